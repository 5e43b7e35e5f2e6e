"""Spans on their way to the file: whole lines, bounded in every direction, and never in the caller's way."""

import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from shared.errors import EnvironmentFault
from shared.telemetry.telemetry import Span
from shared.telemetry.trace_file import OnDrop, SpanWriter, TraceFile


def make_span(name: str = "decode", **attributes: object) -> Span:
    return Span("a" * 32, "b" * 16, "c" * 16, name, 10, 20, attributes)  # type: ignore[arg-type]


def test_a_span_is_one_json_line(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "traces" / "decode-0.jsonl", "decode-0", "12345678")
    file.write([make_span(num_tokens=3), make_span("other")])
    file.close()
    first, second = (tmp_path / "traces" / "decode-0.jsonl").read_text().splitlines()
    assert json.loads(first) == {
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "parent_id": "c" * 16,
        "name": "decode",
        "service": "decode-0",
        "instance": "12345678",
        "start_ns": 10,
        "end_ns": 20,
        "attributes": {"num_tokens": 3},
    }
    assert json.loads(second)["name"] == "other"


def test_a_restarted_process_appends(tmp_path: Path) -> None:
    for instance in ("11111111", "22222222"):
        file = TraceFile(tmp_path / "x.jsonl", "x", instance)
        file.write([make_span()])
        file.close()
    assert [json.loads(line)["instance"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == ["11111111", "22222222"]


def test_the_file_is_bounded(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "x.jsonl", "x", "11111111", max_bytes=1000)
    for number in range(100):
        file.write([make_span(f"span-{number}")])
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.1"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "x.jsonl").read_text().splitlines()[-1])["name"] == "span-99"


def test_a_folder_that_cannot_be_is_a_fault_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="traces cannot be written") as caught:
        TraceFile(tmp_path / "file" / "x.jsonl", "x", "11111111")
    assert "SS_TRACE_DIR" in caught.value.remedy


class GatedSink:
    """Stands still until `gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.spans: list[Span] = []
        self.is_closed = False

    def count_drops(self, on_drop: OnDrop) -> None:
        pass

    def write(self, spans: Sequence[Span]) -> None:
        self.entered.set()
        self.gate.wait()
        self.spans += spans

    def close(self) -> None:
        self.is_closed = True


class BrokenSink:
    """A full disk."""

    def count_drops(self, on_drop: OnDrop) -> None:
        pass

    def write(self, spans: Sequence[Span]) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


def test_a_sink_that_stands_still_costs_spans_and_no_time() -> None:
    sink, drops = GatedSink(), Counter[str]()
    writer = SpanWriter([sink], lambda number, reason: drops.update({reason: number}), queue_spans=10)
    writer.put(make_span())
    assert sink.entered.wait(10)
    for _ in range(25):
        writer.put(make_span())
    assert drops == {"queue_full": 15}
    writer.begin_close()
    writer.join(0.01)
    assert not sink.is_closed, "the writer was left behind, and the caller went on"
    sink.gate.set()
    writer.join(10)
    assert len(sink.spans) == 11
    assert sink.is_closed


def test_what_cannot_be_written_is_counted_and_the_other_sinks_go_on(caplog: pytest.LogCaptureFixture) -> None:
    sink, drops = GatedSink(), Counter[str]()
    sink.gate.set()
    writer = SpanWriter([BrokenSink(), sink], lambda number, reason: drops.update({reason: number}))
    writer.put(make_span())
    writer.put(make_span())
    writer.begin_close()
    writer.join(10)
    assert drops == {"BrokenSink": 2}
    assert len(sink.spans) == 2
    assert "No space left" in caplog.text


def test_an_attribute_that_no_json_can_say_is_dropped_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drops = Counter[str]()
    writer = SpanWriter([TraceFile(tmp_path / "x.jsonl", "x", "1" * 8)], lambda number, reason: drops.update({reason: number}))
    writer.put(make_span(bad=object()))
    writer.begin_close()
    writer.join(10)
    assert drops == {"TraceFile": 1}
