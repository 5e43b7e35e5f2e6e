"""Finished spans on their way out: a bounded queue, one thread, a file of JSON lines, and whoever else takes spans."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shared.errors import EnvironmentFault
from shared.telemetry.telemetry import Span

QUEUE_SPANS = 8192
EVERY_S = 0.25
MAX_FILE_BYTES = 64 * 2**20
COMPLAIN_EVERY_S = 60.0

log = logging.getLogger(__name__)

OnDrop = Callable[[int, str], None]
"""(number of spans, why)."""


class SpanSink(Protocol):
    """Takes spans in the writer's thread. May wait; may raise OSError or ValueError: the batch is dropped, counted and complained about."""

    def count_drops(self, on_drop: OnDrop) -> None:
        """Call `on_drop` for spans that are lost after `write` has taken them."""

    def write(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


class TraceLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace file."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    """As in `Span`."""


class TraceFile:
    """`<trace_dir>/<name>.jsonl`, appended to. At 64 MiB it becomes `<name>.jsonl.1` in place of the last one."""

    def __init__(self, path: Path, service: str, instance: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._service = service
        self._instance = instance
        self._max_bytes = max_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = self._open()
        except OSError as error:
            reason = error.strerror or str(error)
            raise EnvironmentFault(
                f"traces cannot be written to {path}: {reason}", remedy="Set SS_TRACE_DIR to a writable folder"
            ) from error
        self._num_bytes = os.fstat(self._fd).st_size

    def count_drops(self, on_drop: OnDrop) -> None:
        """What is written is there."""

    def write(self, spans: Sequence[Span]) -> None:
        data = b"".join(self._line(span) for span in spans)
        if self._num_bytes and self._num_bytes + len(data) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            os.close(self._fd)
            self._fd, self._num_bytes = self._open(), 0
        os.write(self._fd, data)  # one call: lines of two processes in one file never mix
        self._num_bytes += len(data)

    def close(self) -> None:
        os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _line(self, span: Span) -> bytes:
        line = TraceLine(
            span.trace_id,
            span.span_id,
            span.parent_id,
            span.name,
            self._service,
            self._instance,
            span.start_ns,
            span.end_ns,
            span.attributes,
        )
        return msgspec.json.encode(line) + b"\n"


class SpanWriter:
    """`put` costs the caller an append. What comes while the queue is full is dropped and counted."""

    def __init__(self, sinks: Sequence[SpanSink], on_drop: OnDrop, queue_spans: int = QUEUE_SPANS) -> None:
        self._sinks = sinks
        for sink in sinks:
            sink.count_drops(on_drop)
        self._on_drop = on_drop
        self._queue_spans = queue_spans
        self._queue: deque[Span] = deque()
        self._closing = threading.Event()
        self._complained_s = -COMPLAIN_EVERY_S
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        if len(self._queue) >= self._queue_spans:
            self._on_drop(1, "queue_full")
        else:
            self._queue.append(span)

    def begin_close(self) -> None:
        """Have the thread write what is queued, close the sinks and end."""
        self._closing.set()

    def join(self, limit_s: float) -> None:
        """Wait for that. A sink that hangs is left behind: the thread does not keep the process."""
        self._thread.join(max(limit_s, 0.0))

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            self._flush()
        self._flush()
        for sink in self._sinks:
            sink.close()

    def _flush(self) -> None:
        spans = [self._queue.popleft() for _ in range(len(self._queue))]
        if not spans:
            return
        for sink in self._sinks:
            try:
                sink.write(spans)
            except (OSError, ValueError, TypeError) as error:
                self._on_drop(len(spans), type(sink).__name__)
                if time.monotonic() - self._complained_s > COMPLAIN_EVERY_S:
                    self._complained_s = time.monotonic()
                    log.warning("spans dropped by %s: %s", type(sink).__name__, error)
