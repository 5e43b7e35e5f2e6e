"""What the HTTP door answers: routes, headers, metrics, and replies, whole and in events."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.door import CHAT, TEXT, Door, chat, text
from tests.support.http import Reply
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


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
    telemetry = door.telemetry
    await door.web.post(TEXT, text(max_tokens=7))
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prompt_tokens", "generation_tokens"):
        assert telemetry.observations[(f"vllm:request_{name}", (("model_name", MODEL),))], name
    assert telemetry.observations[("vllm:request_generation_tokens", (("model_name", MODEL),))][-1] == 7
    for name, value in (("params_n", 1), ("params_max_tokens", 7), ("max_num_generation_tokens", 7)):
        assert telemetry.observations[(f"vllm:request_{name}", (("model_name", MODEL),))][-1] == value, name
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        await until(lambda name=name: (f"vllm:{name}", (("model_name", MODEL),)) in telemetry.gauges)  # type: ignore[misc]


async def test_the_server_metrics_of_the_genai_conventions(door: Door) -> None:
    telemetry = door.telemetry
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
    assert reply.headers["x-slipstream-ignored"] == "frobnicate, user"
    reply = await door.web.post("/tokenize", {"prompt": "x", "frobnicate": 1})
    assert (reply.status, reply.headers["x-slipstream-ignored"]) == (200, "frobnicate")


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


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_logprobs_of_a_stream_are_those_of_the_whole(door: Door, path: str) -> None:
    """More than one piece of them, for each choice."""
    body = (chat if path == CHAT else text)(n=2, temperature=0, max_tokens=150, ignore_eos=True)
    body |= {"logprobs": True, "top_logprobs": 3} if path == CHAT else {"logprobs": 3}
    whole = (await door.web.post(path, body)).json["choices"]
    events = (await door.web.post(path, {**body, "stream": True})).events[:-1]
    for index in (0, 1):
        parts = [choice["logprobs"] for event in events for choice in event["choices"] if choice["index"] == index and choice["logprobs"]]
        assert len(parts) > 1
        assert {name: [entry for part in parts for entry in part[name]] for name in parts[0]} == whole[index]["logprobs"]
        assert {len(entries) for entries in whole[index]["logprobs"].values()} == {150}
    if path == TEXT:
        tokens, offsets = (whole[0]["logprobs"][name] for name in ("tokens", "text_offset"))
        assert offsets == [sum(map(len, tokens[:at])) for at in range(150)]


async def test_tokens_and_back(door: Door) -> None:
    tokens = (await door.web.post("/tokenize", {"prompt": "Grüße, 世界 🙂"})).json["tokens"]
    assert (await door.web.post("/detokenize", {"tokens": tokens})).json["prompt"] == "Grüße, 世界 🙂"


async def test_cached_tokens_are_told(door: Door) -> None:
    body = text(prompt=[2000 + index for index in range(40)])
    first, second = await door.web.post(TEXT, body), await door.web.post(TEXT, body)
    assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert second.headers["x-slipstream-cached-tokens"] == "32"


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

    telemetry = door.telemetry

    await door.web.post(CHAT, prompt("2026-12-01 09:30"))
    before = telemetry.total("prompt_fork_tokens", place="later", kind="time")
    reply = await door.web.post(CHAT, prompt("2026-12-02 17:45"))
    behind = telemetry.total("prompt_fork_tokens", place="later", kind="time") - before
    num_tokens = reply.json["usage"]["prompt_tokens"]
    assert 20 < behind < num_tokens - 20
    told = telemetry.spans[-1].attributes
    assert (told["diverged_at"], told["diverged_kind"]) == (num_tokens - behind, "time")
    assert "2026-12" not in str(telemetry.counts) + str(telemetry.spans)


async def test_a_last_message_is_continued_where_it_ends(door: Door) -> None:
    messages = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "It is  "}]
    asked = {"messages": messages, "add_generation_prompt": False}
    closed = await door.web.post("/tokenize", asked)
    left_open = await door.web.post("/tokenize", asked | {"continue_final_message": True})
    text = (await door.web.post("/detokenize", {"tokens": left_open.json["tokens"]})).json["prompt"]
    assert text.endswith("It is  ") and len(closed.json["tokens"]) > len(left_open.json["tokens"])
    reply = await door.web.post(CHAT, chat(messages=messages, add_generation_prompt=False, continue_final_message=True))
    assert (reply.status, reply.json["usage"]["prompt_tokens"]) == (200, left_open.json["count"])
    assert "x-slipstream-ignored" not in reply.headers
    refused = await door.web.post(CHAT, chat(messages=messages, continue_final_message=True))
    assert (refused.status, refused.error["param"]) == (400, "continue_final_message")
