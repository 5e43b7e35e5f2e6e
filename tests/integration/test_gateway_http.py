"""The HTTP door of a real gateway, with a real router and a simulated worker behind it, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import uvicorn

from services.decode.service import DecodeService
from services.gateway.protocol import bounded_protocol
from services.gateway.service import GatewayService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.streams import provision
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.cluster import Cluster
from tests.support.http import Reply, Web, read_reply, request_bytes
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NAMESPACE = "httpdoor"
READ_S = 1.0
"""How long the gateway waits for the rest of a request."""


class Door:
    """What the tests need of the cluster."""

    def __init__(self, gateway: GatewayService, worker: DecodeService) -> None:
        self.gateway = gateway
        self.worker = worker
        self.web = Web(gateway.describe().http_address)

    async def is_unharmed(self) -> None:
        reply = await self.web.post(TEXT, {"model": MODEL, "prompt": [1000, 1001], "max_tokens": 1})
        assert reply.status == 200, reply.body


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def door(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Door]:
    broker = MemoryBroker()
    buses: list[MemoryBus] = []

    async def make_bus() -> MemoryBus:
        buses.append(MemoryBus(broker))
        return buses[-1]

    await provision(await make_bus(), Subjects(NAMESPACE))
    async with Cluster(make_bus, NAMESPACE, tmp_path_factory.mktemp("door"), "a=0,d=2", read_s=READ_S) as cluster:  # type: ignore[arg-type]
        worker = await cluster.decode()
        await cluster.router()
        await cluster.served()
        yield Door(cluster.gateway, worker)
    for bus in buses:
        await bus.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello there", "max_tokens": 3, **fields}


BAD: list[tuple[str, bytes | dict[str, Any], int, str | None]] = [
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b"", 400, None),
    (CHAT, b'{"a":' * 100_000, 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, chat(model="gpt-4"), 404, "model"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}]}, 400, "model"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages="hi"), 400, "messages"),
    (CHAT, chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), 400, None),
    (CHAT, chat(max_tokens=0), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    (CHAT, chat(max_tokens=100_000), 400, "max_tokens"),
    (CHAT, chat(max_tokens=2**63), 400, None),
    (CHAT, chat(max_tokens="three"), 400, "max_tokens"),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":NaN}', 400, None),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"x"}],"temperature":1e999}', 400, None),
    (CHAT, chat(temperature=-1), 400, "temperature"),
    (CHAT, chat(temperature=3), 400, "temperature"),
    (CHAT, chat(top_p=0), 400, "top_p"),
    (CHAT, chat(n=10**9), 400, "n"),
    (CHAT, chat(n=0), 400, "n"),
    (CHAT, chat(stop=["x"] * 100_000), 400, "stop"),
    (CHAT, chat(stop=""), 400, "stop"),
    (CHAT, chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs"),
    (CHAT, chat(top_logprobs=2), 400, "top_logprobs"),
    (CHAT, chat(logit_bias={"x": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"999999": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"1" * 5000: 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={"١": 1}), 400, "logit_bias"),
    (CHAT, chat(logit_bias={str(number): 1 for number in range(2000)}), 400, "logit_bias"),
    (CHAT, chat(stream_options={"include_usage": True}), 400, "stream_options"),
    (CHAT, chat(slipstream={"deadline_ms": 0}), 400, "slipstream.deadline_ms"),
    (CHAT, chat(slipstream={"deadline_ms": 10**9}), 400, "slipstream.deadline_ms"),
    (CHAT, chat(slipstream="now"), 400, "slipstream"),
    (CHAT, chat(chat_template_kwargs={"messages": 1}), 400, "chat_template_kwargs"),
    (CHAT, chat(tools=[{"type": "function"}], tool_choice="required"), 501, None),
    (CHAT, chat(response_format={"type": "json_object"}), 501, None),
    (CHAT, b'{"model":"' + MODEL.encode() + b'","messages":[{"role":"user","content":"\\ud800"}]}', 400, None),
    (TEXT, text(prompt=""), 400, "prompt"),
    (TEXT, text(prompt=[]), 400, "prompt"),
    (TEXT, text(prompt=[[]]), 400, "prompt"),
    (TEXT, text(prompt=["a", 1]), 400, "prompt"),
    (TEXT, text(prompt=[10**7]), 400, "prompt"),
    (TEXT, text(prompt=[-1]), 400, "prompt"),
    (TEXT, text(prompt=[1000, 2**70]), 400, "prompt"),
    (TEXT, text(prompt=[[1000], [49_152]]), 400, "prompt"),
    (TEXT, text(stop_token_ids=[49_152]), 400, "stop_token_ids"),
    (TEXT, text(stop_token_ids=[-1]), 400, "stop_token_ids"),
    (CHAT, chat(tools=[{}]), 501, None),
    (CHAT, chat(tools=[{"type": "function"}], tool_choice="auto"), 501, None),
    (TEXT, text(prompt=[1000] * 9000), 400, "messages"),
    (TEXT, text(prompt=5), 400, "prompt"),
    (TEXT, text(logprobs=21), 400, "logprobs"),
    (TEXT, text(best_of=3), 400, "best_of"),
    (TEXT, text(suffix="x"), 400, "suffix"),
    (TEXT, text(echo=True, logprobs=1), 501, None),
    ("/v1/embeddings", {"model": MODEL, "input": "x"}, 501, None),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [10**7]}, 400, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
async def test_bad_input_is_refused_by_name(door: Door, path: str, body: Any, status: int, param: str | None) -> None:
    reply = await door.web.post(path, body)
    assert reply.status == status, reply.body[:300]
    if param is not None:
        assert reply.error["param"] == param
    assert reply.error["code"]
    assert len(door.gateway.sessions) == 0
    await door.is_unharmed()


async def test_a_text_that_is_far_too_long_holds_up_nobody(door: Door) -> None:
    """It is refused before all of it is tokenised, and while that goes on, other threads and the event loop run."""
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    long = "The quick brown fox jumps over the lazy dog. " * 80_000
    refused = [door.web.post(CHAT, chat(messages=[{"role": "user", "content": long}])), door.web.post(TEXT, text(prompt=long))]
    for reply in await asyncio.gather(*refused):
        assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded"), reply.body[:300]
        assert "more than" in reply.error["message"]
    ticking.cancel()
    fits = await door.web.post(TEXT, text(prompt="The quick brown fox jumps over the lazy dog. " * 500, max_tokens=1))
    assert fits.status == 200 and 4500 < fits.json["usage"]["prompt_tokens"] < 6000
    assert len(ticks) > 20


async def test_a_call_ends_at_the_deadline_that_it_set(door: Door) -> None:
    """The worker takes 2 ms a token."""
    body = text(max_tokens=2000, ignore_eos=True, slipstream={"deadline_ms": 300})
    reply = await door.web.post(TEXT, body)
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded"), reply.body[:300]
    await until(lambda: not door.worker.jobs())
    await door.is_unharmed()


async def test_a_date_that_keeps_prompts_from_being_reused_is_counted(door: Door) -> None:
    """Through the real template and tokenizer; what is counted is the kind, and how much stands behind it."""
    rules = "Answer shortly, in plain words, and never make anything up. If you do not know, say so, and say where one could look. "

    def prompt(day: str) -> dict[str, Any]:
        return chat(messages=[{"role": "system", "content": f"{rules} It is {day}. {rules}"}, {"role": "user", "content": "hi"}])

    telemetry = door.gateway.telemetry
    assert isinstance(telemetry, NullTelemetry)

    await door.web.post(CHAT, prompt("2026-12-01 09:30"))
    before = telemetry.total("prompt_fork_tokens", place="later", kind="time")
    reply = await door.web.post(CHAT, prompt("2026-12-02 17:45"))
    behind = telemetry.total("prompt_fork_tokens", place="later", kind="time") - before
    assert 20 < behind < reply.json["usage"]["prompt_tokens"] - 20
    assert "2026" not in str(telemetry.counts)


async def test_an_unknown_model_names_those_that_are_served(door: Door) -> None:
    error = (await door.web.post(CHAT, chat(model="gpt-4"))).error
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


async def test_too_long_a_prompt_names_both_numbers(door: Door) -> None:
    error = (await door.web.post(TEXT, text(prompt=[1000] * 9000))).error
    assert error["code"] == "context_length_exceeded"
    assert "9000" in error["message"]
    assert "8192" in error["message"]


async def test_a_large_body_is_not_read_to_its_end(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 4194305"))
    assert b" 413 " in await reader.readline()
    writer.close()
    await door.is_unharmed()


async def test_a_request_that_does_not_come_to_its_end_is_given_up(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 100") + b'{"model":')
    assert b" 408 " in await reader.readline()
    writer.close()
    await door.is_unharmed()


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HT", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_to_its_end_costs_its_connection(begun: bytes) -> None:
    """Against the protocol alone, with a patience that a test has."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("there was no request")

    settings = uvicorn.Config(app, http=bounded_protocol(0.2, 100), lifespan="off", log_config=None, port=0)
    settings.load()
    server = uvicorn.Server(settings)
    server.lifespan = settings.lifespan_class(settings)
    await server.startup()
    host, port = server.servers[0].sockets[0].getsockname()[:2]
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(begun)
    assert await reader.read() == b""
    writer.close()
    await server.shutdown()


async def test_what_is_no_http_is_refused_in_the_apis_words(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    reply = await read_reply(reader)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    writer.close()
    await door.is_unharmed()


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        _, writer = await door.web.connect()
        writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 100") + b'{"model":')
        await writer.drain()
        writer.transport.abort()
    await door.is_unharmed()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_routes_methods_and_ids(door: Door) -> None:
    assert (await door.web.get("/nowhere")).error["code"] == "not_found"
    wrong = await door.web.get(CHAT)
    assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
    kept = await door.web.get("/live", x_request_id="abc-1.2_3")
    assert kept.headers["x-request-id"] == "abc-1.2_3"
    for odd in ("a b", "x" * 65, "a*b", "ü"):
        assert (await door.web.get("/live", x_request_id=odd)).headers["x-request-id"] != odd
    assert (await door.web.get("/health")).json["status"] == "ok"
    assert [model["id"] for model in (await door.web.get("/v1/models")).json["data"]] == [MODEL]
    assert (await door.web.get(f"/v1/models/{MODEL}")).json["max_model_len"] == 8192
    assert (await door.web.get("/v1/models/other")).status == 404
    assert set((await door.web.get("/openapi.json")).json["paths"]) >= {CHAT, TEXT}


async def test_why_it_went_where_it_went_is_told_on_request(door: Door) -> None:
    for stream in (False, True):
        told = (await door.web.post(TEXT, text(stream=stream), x_slipstream_explain="1")).headers["x-slipstream-explanation"]
        assert told.startswith(f"{door.worker.describe().name} (")
        assert "overlap" in told and f"*{door.worker.describe().name} score" in told
    assert "x-slipstream-explanation" not in (await door.web.post(TEXT, text())).headers


async def test_dashboards_made_for_vllm_find_their_names(door: Door) -> None:
    telemetry = door.gateway.telemetry
    assert isinstance(telemetry, NullTelemetry)
    await door.web.post(TEXT, text(max_tokens=7))
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens", "generation_tokens"):
        assert telemetry.observations[(f"vllm:request_{name}", (("model_name", MODEL),))], name
    assert telemetry.observations[("vllm:request_generation_tokens", (("model_name", MODEL),))][-1] == 7
    for name, value in (("params_n", 1), ("params_max_tokens", 7), ("max_num_generation_tokens", 7)):
        assert telemetry.observations[(f"vllm:request_{name}", (("model_name", MODEL),))][-1] == value, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        await until(lambda name=name: (f"vllm:{name}", (("model_name", MODEL),)) in telemetry.gauges)  # type: ignore[misc]


async def test_the_server_metrics_of_the_genai_conventions(door: Door) -> None:
    telemetry = door.gateway.telemetry
    assert isinstance(telemetry, NullTelemetry)
    labels = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "slipstream", "gen_ai_request_model": MODEL}
    durations = telemetry.observations[("gen_ai_server_request_duration_seconds", tuple(sorted((labels | {"error_type": ""}).items())))]
    rest = [
        telemetry.observations[(f"gen_ai_server_time_{name}_seconds", tuple(sorted(labels.items())))]
        for name in ("to_first_token", "per_output_token")
    ]
    before = [len(durations), *map(len, rest)]
    assert (await door.web.post(CHAT, chat(max_tokens=7, ignore_eos=True))).status == 200
    assert [len(durations), *map(len, rest)] == [count + 1 for count in before]
    assert durations[-1] >= rest[0][-1] > 0


async def test_unknown_fields_are_ignored_and_listed(door: Door) -> None:
    reply = await door.web.post(CHAT, chat(frobnicate=1, user="me"))
    assert reply.status == 200
    assert reply.headers["x-slipstream-ignored"] == "frobnicate"


def joined(reply: Reply, index: int = 0) -> str:
    choices = [choice for event in reply.events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


async def test_a_stream_says_what_the_whole_says(door: Door) -> None:
    for path, body in ((CHAT, chat(temperature=0, max_tokens=20)), (TEXT, text(temperature=0, max_tokens=20))):
        whole = await door.web.post(path, body)
        stream = await door.web.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
        choice = whole.json["choices"][0]
        assert joined(stream) == (choice["message"]["content"] if path == CHAT else choice["text"])
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert stream.events[-1] == "[DONE]"
        assert stream.events[-2]["choices"] == []
        assert stream.events[-2]["usage"]["completion_tokens"] == whole.json["usage"]["completion_tokens"] == 20
        reasons = [choice["finish_reason"] for event in stream.events[:-2] for choice in event["choices"]]
        assert [reason for reason in reasons if reason] == ["length"]
        assert len({event["id"] for event in stream.events[:-1]}) == 1


async def test_the_role_comes_first_and_once(door: Door) -> None:
    events = (await door.web.post(CHAT, chat(n=2, stream=True))).events[:-1]
    for index in (0, 1):
        deltas = [choice["delta"] for event in events for choice in event["choices"] if choice["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not any("role" in delta for delta in deltas[1:])


async def test_continuous_usage_grows(door: Door) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (await door.web.post(TEXT, text(stream=True, max_tokens=30, stream_options=options))).events[:-1]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 30


async def test_choices_and_prompts_are_counted(door: Door) -> None:
    reply = await door.web.post(TEXT, text(prompt=["one", "two"], n=3))
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(6))
    assert reply.json["usage"]["completion_tokens"] == 18
    tokens = await door.web.post(TEXT, text(prompt=[[1000, 1001], [1002]]))
    assert tokens.json["usage"]["prompt_tokens"] == 3


async def test_echo_shows_the_prompt(door: Door) -> None:
    reply = await door.web.post(TEXT, text(prompt="hello there", echo=True))
    assert reply.json["choices"][0]["text"].startswith("hello there")


async def test_stop_strings_cut_the_text_wherever_tokens_end(door: Door) -> None:
    body = text(temperature=0, max_tokens=40)
    whole = (await door.web.post(TEXT, body)).json["choices"][0]["text"]
    for start, end in ((10, 14), (25, 40), (3, 5)):
        stop = whole[start:end]
        expected = whole[: whole.index(stop)]
        reply = await door.web.post(TEXT, {**body, "stop": stop})
        assert reply.json["choices"][0]["text"] == expected
        assert reply.json["choices"][0]["finish_reason"] == "stop"
        stream = await door.web.post(TEXT, {**body, "stop": [stop, "never in it"], "stream": True})
        assert joined(stream) == expected
        kept = await door.web.post(TEXT, {**body, "stop": stop, "include_stop_str_in_output": True})
        assert kept.json["choices"][0]["text"] == expected + stop
    await until(lambda: not door.worker.jobs())


async def test_a_stop_token_is_not_shown(door: Door) -> None:
    body = text(temperature=0, max_tokens=12, logprobs=0)
    plain = (await door.web.post(TEXT, body)).json["choices"][0]
    ids = (await door.web.post("/tokenize", {"prompt": plain["logprobs"]["tokens"][5]})).json["tokens"]
    if len(ids) == 1:
        stopped = (await door.web.post(TEXT, {**body, "stop_token_ids": ids})).json["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert stopped["text"] == "".join(plain["logprobs"]["tokens"][:5])


async def test_logprobs_stand_beside_their_tokens(door: Door) -> None:
    reply = (await door.web.post(CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=4))).json["choices"][0]["logprobs"]["content"]
    assert len(reply) == 4
    assert all(len(token["top_logprobs"]) == 2 for token in reply)


async def test_tokens_and_back(door: Door) -> None:
    tokens = (await door.web.post("/tokenize", {"prompt": "Grüße, 世界 🙂"})).json["tokens"]
    assert (await door.web.post("/detokenize", {"tokens": tokens})).json["prompt"] == "Grüße, 世界 🙂"


async def test_cached_tokens_are_told(door: Door) -> None:
    body = text(prompt=[2000 + index for index in range(40)])
    first, second = await door.web.post(TEXT, body), await door.web.post(TEXT, body)
    assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert second.headers["x-slipstream-cached-tokens"] == "32"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_for_text", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(door: Door, stream: bool, wait_for_text: bool) -> None:
    reader, writer = await door.web.connect()
    body = msgspec.json.encode(text(max_tokens=4000, ignore_eos=True, stream=stream))
    writer.write(request_bytes("POST", TEXT, body))
    await until(lambda: door.worker.scheduler.running)
    if wait_for_text and stream:
        await reader.readuntil(b"data: ")
    writer.close()
    await until(lambda: len(door.gateway.sessions) == 0 and not door.worker.jobs())
    door.worker.scheduler.pool.check_integrity()
    assert door.worker.scheduler.pool.num_used == 0


async def test_many_that_leave_do_not_keep_the_next_waiting(door: Door) -> None:
    """Two hundred long requests whose clients give up at once; then a short one must be answered."""
    writers = []
    for number in range(200):
        _, writer = await door.web.connect()
        writer.write(request_bytes("POST", TEXT, msgspec.json.encode(text(prompt=[3000 + number], max_tokens=4000, stream=True))))
        writers.append(writer)
    await until(lambda: len(door.gateway.sessions) == 200)
    for writer in writers:
        writer.close()
    reply = await door.web.post(TEXT, text(max_tokens=10))
    assert reply.status == 200
    await until(lambda: not door.worker.jobs() and len(door.gateway.sessions) == 0)
