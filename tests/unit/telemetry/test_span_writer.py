"""Spans on their way out: bounded, counted, and never in the caller's way."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from shared.telemetry import span_writer
from shared.telemetry.live import LiveTelemetry
from shared.telemetry.span_writer import BATCH_SPANS, SpanWriter
from shared.telemetry.telemetry import Span

SPAN = Span("a" * 32, "b" * 16, "c" * 16, "decode", 10, 20, {})


class GatedSink:
    """Stands still until `gate` is set."""

    label = "gate"
    every_s = 0.25

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.batches: list[int] = []
        self.is_closed = False

    def write(self, spans: Sequence[Span]) -> None:
        self.entered.set()
        self.gate.wait()
        self.batches.append(len(spans))

    def close(self) -> None:
        self.is_closed = True


class FullDisk(GatedSink):
    """Fails every time, once the gate is open."""

    label = "disk"

    def write(self, spans: Sequence[Span]) -> None:
        super().write(spans)
        raise OSError(28, "No space left on device")


def counted(drops: Counter[str]) -> Callable[[int, str], None]:
    return lambda number, reason: drops.update({reason: number})


def test_a_sink_that_stands_still_costs_spans_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    sink, drops = GatedSink(), Counter[str]()
    writer = SpanWriter(sink, counted(drops), queue_spans=10)
    writer.put(SPAN)
    assert sink.entered.wait(10)
    for _ in range(25):
        writer.put(SPAN)
    assert drops == {"queue_full": 15}
    writer.begin_close()
    writer.join(0.01)
    assert not sink.is_closed, "the writer was left behind, and the caller went on"
    assert "still on their way to the gate at the end; 10 more were not sent" in caplog.text
    sink.gate.set()
    writer.join(10)
    assert sink.batches == [1, 10]
    assert sink.is_closed


def test_what_cannot_be_written_is_counted_each_time_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    sink, drops = FullDisk(), Counter[str]()
    writer = SpanWriter(sink, counted(drops))
    writer.put(SPAN)
    assert sink.entered.wait(10)
    for _ in range(BATCH_SPANS + 2):
        writer.put(SPAN)
    sink.gate.set()
    writer.begin_close()
    writer.join(10)
    assert drops == {"disk": BATCH_SPANS + 3}
    assert sink.batches == [1, BATCH_SPANS, 2]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "No space left" in caplog.text


async def test_a_sink_that_hangs_keeps_no_span_from_another() -> None:
    hanging, fine = GatedSink(), GatedSink()
    fine.gate.set()
    telemetry = LiveTelemetry([hanging, fine])
    telemetry.span("decode", traceparent=telemetry.mint_traceparent(), start_ns=1, end_ns=2)
    assert hanging.entered.wait(10)
    assert fine.entered.wait(10)
    telemetry.span("decode", traceparent=telemetry.mint_traceparent(), start_ns=1, end_ns=2)
    hanging.gate.set()
    await telemetry.close()
    assert sum(fine.batches) == sum(hanging.batches) == 2


@pytest.mark.timeout(20)
def test_a_sink_that_hangs_or_failed_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each service of a stack would hold up its stop by what the collector's time-out is."""
    monkeypatch.setattr(span_writer, "HANGS_S", 0.0)
    hanging, drops = GatedSink(), Counter[str]()
    writer = SpanWriter(hanging, counted(drops))
    writer.put(SPAN)
    assert hanging.entered.wait(10)
    writer.begin_close()
    writer.join(60)
    assert not hanging.is_closed
    hanging.gate.set()

    monkeypatch.setattr(span_writer, "HANGS_S", 60.0)
    broken = FullDisk()
    broken.gate.set()
    writer = SpanWriter(broken, counted(drops))
    writer.put(SPAN)
    while not drops:
        time.sleep(0.01)
    broken.gate.clear()
    broken.entered.clear()
    writer.put(SPAN)
    assert broken.entered.wait(10)
    writer.begin_close()
    writer.join(60)
    assert not broken.is_closed
    broken.gate.set()
