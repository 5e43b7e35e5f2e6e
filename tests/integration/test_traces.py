"""What a call leaves in spans and logs when it does not go well: whatever its end, one trace tells of it, and log lines name the trace."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
import pytest
import pytest_asyncio

from services.decode.service import DecodeService
from services.gateway.service import GatewayService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.streams import provision
from shared.errors import NoCapacity
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry, propagation
from shared.telemetry.logs import JsonFormatter
from shared.telemetry.telemetry import Span, Telemetry
from tests.support.cluster import Cluster
from tests.support.http import Reply, Web, request_bytes
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)

TEXT = "/v1/completions"
CALLER = "00-0123456789abcdef0123456789abcdef-00000000000000c1-01"
NAMESPACE = "traced"


class Stack:
    """A gateway, a router and a decode worker in this process."""

    def __init__(self, cluster: Cluster, worker: DecodeService, router: Telemetry) -> None:
        self.gateway: GatewayService = cluster.gateway
        self.worker = worker
        self.web = Web(self.gateway.describe().http_address)
        self._telemetries = [self.gateway.telemetry, router, worker.telemetry]

    def spans(self, traceparent: str) -> list[Span]:
        """Of that trace, from all services."""
        trace_id = traceparent.split("-")[1]
        kept = [span for telemetry in self._telemetries for span in cast(NullTelemetry, telemetry).spans]
        return [span for span in kept if span.trace_id == trace_id]

    async def ended(self, traceparent: str) -> dict[str, Span]:
        """The spans by name, once the decode worker's is there."""
        await until(lambda: "decode generate" in {span.name for span in self.spans(traceparent)})
        return {span.name: span for span in self.spans(traceparent)}


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    broker = MemoryBroker()
    buses: list[MemoryBus] = []

    async def make_bus() -> MemoryBus:
        buses.append(MemoryBus(broker))
        return buses[-1]

    await provision(await make_bus(), Subjects(NAMESPACE))
    async with Cluster(make_bus, NAMESPACE, tmp_path, "a=0,d=2") as cluster:  # type: ignore[arg-type]
        worker = await cluster.decode()
        router = await cluster.router()
        await cluster.served()
        yield Stack(cluster, worker, router.telemetry)
    for bus in buses:
        await bus.close()


@pytest.fixture
def log_lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """`caplog.text` as a service writes it."""
    caplog.set_level(logging.INFO, logger="services")
    caplog.handler.setFormatter(JsonFormatter("test", "12345678"))
    return caplog


def about(caplog: pytest.LogCaptureFixture, trace_id: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    return [line for line in lines if line.get("trace_id") == trace_id]


def text(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": [1000, 1001, 1002], "max_tokens": 3, **fields}


def broken_forward(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_fails_shows_in_both_spans_and_both_logs_under_one_trace(
    stack: Stack, log_lines: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(stack.worker.engine, "forward", broken_forward)
    reply: Reply = await stack.web.post(TEXT, text(stream=stream), traceparent=CALLER)
    assert reply.status == 500
    spans = await stack.ended(CALLER)
    root, decode = spans[f"text_completion {MODEL}"], spans["decode generate"]
    assert reply.headers["traceparent"] == f"00-{root.trace_id}-{root.span_id}-01"
    assert root.attributes["error.type"] == decode.attributes["error.type"] == "engine_error"
    assert decode.parent_id == root.span_id
    lines = about(log_lines, root.trace_id)
    assert {line["logger"] for line in lines} >= {"services.gateway.ledger", "services.decode.service"}
    assert {line["request_id"] for line in lines} == {root.attributes["request_id"]}
    [told] = [line for line in lines if line["logger"] == "services.gateway.ledger"]
    assert (told["level"], told["code"]) == ("warning", "engine_error")


async def test_a_client_that_leaves_is_seen_at_the_worker_too(stack: Stack) -> None:
    _, writer = await stack.web.connect()
    writer.write(request_bytes("POST", TEXT, msgspec.json.encode(text(max_tokens=4000, ignore_eos=True)), traceparent=CALLER))
    await until(lambda: stack.worker.scheduler.running)
    writer.close()
    spans = await stack.ended(CALLER)
    assert spans["decode generate"].attributes["outcome"] == "cancelled"
    assert "error.type" not in spans["decode generate"].attributes, "nothing failed there"
    assert spans[f"text_completion {MODEL}"].attributes["outcome"] == "cancelled"
    assert [span.name for span in stack.spans(CALLER)].count("decode generate") == 1


async def test_a_call_that_is_refused_is_a_trace_too(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = await stack.web.post(TEXT, text(model="Xylophone"), traceparent=CALLER)
    [span] = stack.spans(CALLER)
    assert (unknown.status, span.name, span.attributes["error.type"]) == (404, "text_completion", "model_not_found")
    assert unknown.headers["traceparent"].split("-")[2] == span.span_id
    assert span.parent_id == CALLER.split("-")[2]
    assert "ylophon" not in repr(span), "a name that is not ours is somebody's text"


async def test_what_is_refused_for_want_of_room_is_counted_and_not_logged(stack: Stack, log_lines: pytest.LogCaptureFixture) -> None:
    stack.gateway.desk.is_draining = True
    reply = await stack.web.post(TEXT, text(), traceparent=CALLER)
    assert (reply.status, reply.json["error"]["code"]) == (503, NoCapacity.code)
    assert about(log_lines, CALLER.split("-")[1]) == []


async def test_an_attempt_says_which_one_it_is_and_where_it_came_from(stack: Stack) -> None:
    reply = await stack.web.post(TEXT, text(), traceparent=CALLER)
    assert reply.status == 200
    spans = await stack.ended(CALLER)
    request_id = spans[f"text_completion {MODEL}"].attributes["request_id"]
    for name, template in (("router route", f"{NAMESPACE}.v1.request.*.*"), ("decode generate", f"{NAMESPACE}.v1.decode.*")):
        told = spans[name].attributes
        assert told["messaging.system"] == "nats"
        assert told["messaging.destination.template"] == template
        assert (told["messaging.message.conversation_id"], told["epoch"]) == (request_id, 0)


async def test_a_trace_that_its_caller_does_not_record_is_not_recorded(stack: Stack) -> None:
    reply = await stack.web.post(TEXT, text(), traceparent=CALLER[:-1] + "0")
    assert reply.status == 200
    context = propagation.parse(reply.headers["traceparent"])
    assert context is not None
    assert not context.is_sampled
    await until(lambda: not stack.worker.jobs())
    assert stack.spans(CALLER) == []
