"""Spans in the file: whole lines, bounded."""

import errno
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from shared.telemetry.span_writer import SpanWriter
from shared.telemetry.telemetry import Span
from shared.telemetry.trace_file import TraceFile


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


def test_a_folder_that_cannot_be_written_costs_its_spans_and_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A volume that belongs to somebody else must not keep a service from starting."""
    (tmp_path / "file").touch()
    file = TraceFile(tmp_path / "file" / "x.jsonl", "x", "11111111")
    [record] = caplog.records
    assert "traces cannot be written" in record.getMessage() and "SS_TRACE_DIR" in record.__dict__["remedy"]
    with pytest.raises(OSError, match="file"):
        file.write([make_span("lost")])
    (tmp_path / "file").unlink()
    file.write([make_span("kept")])
    file.close()
    assert json.loads((tmp_path / "file" / "x.jsonl").read_text())["name"] == "kept"


def test_an_attribute_that_no_json_can_say_is_dropped_not_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drops = Counter[str]()
    writer = SpanWriter(TraceFile(tmp_path / "x.jsonl", "x", "1" * 8), lambda number, reason: drops.update({reason: number}))
    writer.put(make_span(bad=object()))
    writer.begin_close()
    writer.join(10)
    assert drops == {"trace_file": 1}


def test_a_full_disk_gets_its_room_back_and_takes_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TraceFile(tmp_path / "x.jsonl", "x", "11111111", max_bytes=1000)
    for number in range(20):
        file.write([make_span(f"old-{number}")])
    assert (tmp_path / "x.jsonl.1").exists()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "write", full)
        file.write([make_span("lost")])
    file.write([make_span("new")])
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    assert [json.loads(line)["name"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == ["new"]
