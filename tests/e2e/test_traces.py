"""One trace a request, from its client to the last service, as a real OTLP receiver gets it (T52 with it)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from tests.support.otlp import Collector, Received
from tests.support.stack import SIM, checked_stack, metric, status_of

pytestmark = pytest.mark.timeout(180)

CALLER = "00-0123456789abcdef0123456789abcdef-00000000000000c1-01"
TRACE_ID = CALLER.split("-")[1]
THROUGH = {"SS_DISAGGREGATION": "always"}
SLOW = ("--sim-profile", "a=0,b=0.0,c=0.0,d=10")
PROMPT = "The tide comes in and the tide goes out. " * 12


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    environ = THROUGH | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    with checked_stack(tmp_path_factory.mktemp("traces"), *SIM, *SLOW, "--decode", "2", environ=environ) as stack:
        yield stack


async def ask(stack: LocalStack, prompt: str, max_tokens: int = 4, traceparent: str = "") -> Outcome:
    client = Client(stack.url, headers={"traceparent": traceparent} if traceparent else {})
    outcome = await client.generate("/v1/completions", {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens})
    await client.close()
    assert outcome.is_ok, outcome.error
    return outcome


def arrived(collector: Collector, trace_id: str, *names: str) -> dict[str, Received]:
    """Once spans of all these names are there: the last of each."""
    while True:
        found = {span.name: span for span in collector.of(trace_id)}
        if set(names) <= set(found):
            return found
        time.sleep(0.05)


ROOT = "text_completion smollm2-135m"
STAGES = ("router route", "prefill compute", "kvstore commit", "decode load", "kvstore acquire", "decode generate")


def test_one_trace_with_the_right_parents_below_the_callers_own_span(stack: LocalStack, collector: Collector) -> None:
    outcome = asyncio.run(ask(stack, PROMPT, traceparent=CALLER))
    spans = arrived(collector, TRACE_ID, ROOT, *STAGES)
    root = spans[ROOT]
    assert (root.service, root.parent_id) == ("gateway", CALLER.split("-")[2])
    assert outcome.headers["traceparent"] == f"00-{TRACE_ID}-{root.span_id}-01"
    for name in ("router route", "prefill compute", "decode load", "decode generate"):
        assert spans[name].parent_id == root.span_id, name
        assert spans[name].service == name.split()[0]
        assert root.start_ns <= spans[name].start_ns <= spans[name].end_ns
    assert spans["kvstore commit"].parent_id == spans["prefill compute"].span_id
    assert spans["kvstore acquire"].parent_id == spans["decode load"].span_id
    assert spans["kvstore acquire"].attributes["num_blocks"] == spans["decode load"].attributes["num_blocks"] > 0  # type: ignore[operator]
    kinds = {name: spans[name].kind for name in (ROOT, *STAGES)}
    consumers = ("router route", "prefill compute", "decode generate")
    assert kinds == dict.fromkeys((ROOT, *STAGES), "SERVER") | dict.fromkeys(consumers, "CONSUMER") | {"decode load": "CLIENT"}
    assert not any(span.is_error for span in spans.values())
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert root.attributes["gen_ai.request.model"] == "smollm2-135m"
    assert spans["router route"].attributes["candidates"]


def test_nothing_of_a_prompt_stands_in_a_span(stack: LocalStack, collector: Collector) -> None:
    asyncio.run(ask(stack, "Xylophone " * 40))
    assert "ylophon" not in repr(collector.spans)


def test_a_nats_clients_own_trace(stack: LocalStack, collector: Collector) -> None:
    trace_id = "f" * 31 + "1"
    program = f"""
import asyncio, json, nats, sys
async def main():
    client = await nats.connect(sys.argv[1])
    body = json.dumps({{"model": "smollm2-135m", "messages": [{{"role": "user", "content": {PROMPT!r}}}], "max_tokens": 3}})
    headers = {{"traceparent": "00-{trace_id}-00000000000000c2-01"}}
    answer = await client.request("ss.v1.generate", body.encode(), timeout=30, headers=headers)
    print(answer.data.decode())
    await client.close()
asyncio.run(main())
"""
    url = subprocess.run(
        [sys.executable, "-m", "services.console", "nats", "url", "--state-dir", str(stack.state_dir)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    done = subprocess.run([sys.executable, "-c", program, url], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 3
    root = arrived(collector, trace_id, "chat smollm2-135m", "decode generate")["chat smollm2-135m"]
    assert (root.parent_id, root.attributes["door"]) == ("00000000000000c2", "nats")


def test_a_request_that_moved_is_still_one_trace(stack: LocalStack, collector: Collector) -> None:
    trace_id = "a" * 31 + "2"

    async def moved() -> Outcome:
        asking = asyncio.ensure_future(ask(stack, PROMPT + "moved", 200, f"00-{trace_id}-00000000000000c3-01"))
        await asyncio.sleep(0.7)
        for victim in ("decode-0", "decode-1"):
            old = stack.kill(victim)
            await asyncio.to_thread(stack.wait_restarted, victim, old)
        return await asking

    assert asyncio.run(moved()).usage["completion_tokens"] == 200
    root = arrived(collector, trace_id, ROOT, "router route", "decode generate")[ROOT]
    spans = collector.of(trace_id)
    assert root.attributes["num_migrations"] >= 1  # type: ignore[operator]
    routes = [span for span in spans if span.name == "router route"]
    assert len(routes) >= 2, "each attempt was routed"
    assert {span.parent_id for span in routes} == {root.span_id}
    ids = {span.span_id for span in spans} | {"00000000000000c3"}
    assert [span.name for span in spans if span.parent_id not in ids and span.service != "kvstore"] == []
    assert sorted({span.attributes["epoch"] for span in routes})[:2] == [0, 1], "a span says which attempt it is of"


def test_a_client_that_leaves_leaves_a_whole_trace(stack: LocalStack, collector: Collector) -> None:
    trace_id = "b" * 31 + "3"

    async def leave() -> None:
        client = Client(stack.url, headers={"traceparent": f"00-{trace_id}-00000000000000c4-01"})
        body = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 2000, "stream": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await client.generate("/v1/completions", body)
        await client.close()

    asyncio.run(leave())
    spans = arrived(collector, trace_id, ROOT, "router route", "decode generate")
    assert spans["decode generate"].parent_id == spans[ROOT].span_id
    assert spans["decode generate"].attributes["outcome"] == "cancelled"


@pytest.mark.parametrize("kind", ["closed port", "black hole"])
def test_a_dead_collector_costs_nothing_but_its_spans(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """T52: requests are served as ever, and the drain does not wait for it (`checked_stack` sees exit 0)."""
    with Collector() as hanging:
        hanging.hold.clear()
        url = hanging.url if kind == "black hole" else "http://127.0.0.1:9"
        with checked_stack(tmp_path, *SIM, environ=THROUGH | {"OTEL_EXPORTER_OTLP_ENDPOINT": url}) as stack:
            for number in range(20):
                asyncio.run(ask(stack, f"{number} {PROMPT}"))
            [gateway] = [one for one in status_of(stack, capsys)["services"] if one["role"] == "gateway"]
            while not metric(gateway["metrics_address"], "slipstream_telemetry_dropped_total", reason="collector"):
                time.sleep(0.1)
            assert kind == "closed port" or hanging.num_requests
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 15  # four stages of the drain, none of which waits for the collector
