"""A collector that is gone, hangs, refuses or is slow (T52): what it costs is its spans, counted. No caller waits, nor does the end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.config import ServiceConfig
from shared.telemetry.live import CLOSE_S, LiveTelemetry
from shared.telemetry.setup import open_telemetry
from shared.telemetry.span_writer import BATCH_SPANS, QUEUE_SPANS
from tests.support.otlp import Collector


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


Open = Callable[[str], LiveTelemetry]


@pytest.fixture
def telemetry_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Open:
    """The telemetry of a process whose collector is at that URL, and whose trace file is in `tmp_path`."""

    def open_to(url: str) -> LiveTelemetry:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        return open_telemetry(ServiceConfig(name="decode-0", trace_dir=tmp_path), "decode", "12345678", "1.2.3", os.environ)

    return open_to


def record(telemetry: LiveTelemetry, number: int) -> None:
    root = telemetry.mint_traceparent()
    for _ in range(number):
        telemetry.span("decode generate", traceparent=root, start_ns=1, end_ns=2)


def dropped(telemetry: LiveTelemetry, reason: str) -> float:
    return telemetry.registry.get_sample_value("slipstream_telemetry_dropped_total", {"reason": reason}) or 0.0


def num_in_file(trace_dir: Path) -> int:
    return len((trace_dir / "decode-0.jsonl").read_text().splitlines())


async def until(telemetry: LiveTelemetry, reason: str, at_least: int) -> None:
    while dropped(telemetry, reason) < at_least:
        await asyncio.sleep(0.02)


@pytest.mark.timeout(60)
async def test_a_black_hole_drops_what_exceeds_the_queue_and_keeps_the_file_whole(
    collector: Collector, telemetry_to: Open, tmp_path: Path
) -> None:
    collector.hold.clear()
    telemetry = telemetry_to(collector.url)
    record(telemetry, 1)
    while not collector.num_requests:
        await asyncio.sleep(0.02)
    num_recorded = 1
    for half in (QUEUE_SPANS // 2, QUEUE_SPANS // 2):  # the file's own queue gets its time
        record(telemetry, half)
        num_recorded += half
        while num_in_file(tmp_path) < num_recorded:
            await asyncio.sleep(0.02)
    record(telemetry, 5000)
    await until(telemetry, "queue_full", 1)
    began_s = time.monotonic()
    await telemetry.close()
    assert time.monotonic() - began_s < CLOSE_S + 1
    assert num_in_file(tmp_path) == num_recorded + 5000
    collector.hold.set()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["closed port", "refuses", "unavailable"])
async def test_what_does_not_arrive_is_counted_to_the_last_span(
    collector: Collector, telemetry_to: Open, tmp_path: Path, kind: str
) -> None:
    collector.status = {"refuses": 400, "unavailable": 503}.get(kind, 200)
    telemetry = telemetry_to("http://127.0.0.1:9" if kind == "closed port" else collector.url)
    record(telemetry, BATCH_SPANS + 7)
    await until(telemetry, "collector", BATCH_SPANS + 7)
    assert dropped(telemetry, "collector") == BATCH_SPANS + 7
    assert dropped(telemetry, "queue_full") == 0
    await telemetry.close()
    assert num_in_file(tmp_path) == BATCH_SPANS + 7


@pytest.mark.timeout(60)
async def test_one_that_comes_back_gets_what_comes_then(collector: Collector, telemetry_to: Open) -> None:
    collector.status = 400
    telemetry = telemetry_to(collector.url)
    record(telemetry, 3)
    await until(telemetry, "collector", 3)
    collector.status = 200
    record(telemetry, 4)
    await telemetry.close()
    assert len(collector.spans) == 4


@pytest.mark.timeout(60)
def test_a_process_ends_while_its_collector_hangs(collector: Collector, tmp_path: Path) -> None:
    """As a process, because what keeps one alive (threads, exit hooks) shows nowhere else."""
    collector.hold.clear()
    program = f"""
        import asyncio, os, time
        from pathlib import Path
        from shared.config import ServiceConfig
        from shared.telemetry.setup import open_telemetry
        telemetry = open_telemetry(ServiceConfig(name="x", trace_dir=Path({str(tmp_path)!r})), "decode", "12345678", "1", os.environ)
        telemetry.span("decode generate", traceparent=telemetry.mint_traceparent(), start_ns=1, end_ns=2)
        time.sleep(0.5)
        print(time.time(), flush=True)
        asyncio.run(telemetry.close())
    """
    environ = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environ, capture_output=True, text=True, check=True)
    assert time.time() - float(done.stdout) < CLOSE_S + 3
    assert collector.num_requests == 1
    assert collector.spans == []
    collector.hold.set()
