"""Finished spans on their way out: a bounded queue and a thread for each place where they go, so that one that hangs holds up no other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from shared.telemetry.telemetry import Span

QUEUE_SPANS = 8192
BATCH_SPANS = 1024
COMPLAIN_EVERY_S = 60.0
HANGS_S = 0.5
"""A write that takes longer is not waited for at the end."""
HOPELESS_S = 0.1
"""What is waited at the end for a sink that does not work: a process that ends has better things to do."""

log = logging.getLogger(__name__)

OnDrop = Callable[[int, str], None]
"""(number of spans, why)."""


class SpanSink(Protocol):
    """Takes spans in its writer's thread. May wait; may raise OSError or ValueError: the batch is dropped, counted and complained about."""

    label: str
    """Names it where its drops are counted."""
    every_s: float
    """How often it is given what has come: a batch has a cost of its own."""

    def write(self, spans: Sequence[Span]) -> None: ...

    def close(self) -> None: ...


class SpanWriter:
    """`put` costs the caller an append. What comes while the queue is full is dropped and counted."""

    def __init__(self, sink: SpanSink, on_drop: OnDrop, queue_spans: int = QUEUE_SPANS) -> None:
        self._sink = sink
        self._on_drop = on_drop
        self._queue_spans = queue_spans
        self._queue: deque[Span] = deque()
        self._closing = threading.Event()
        self._complained_s = -COMPLAIN_EVERY_S
        self._began_s: float | None = None
        """When the write that runs now began."""
        self._has_failed = False
        """The last write did."""
        self._thread = threading.Thread(target=self._run, name=f"spans-{sink.label}", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        if len(self._queue) >= self._queue_spans:
            self._on_drop(1, "queue_full")
        else:
            self._queue.append(span)

    def begin_close(self) -> None:
        """Have the thread write what is queued, close the sink and end."""
        self._closing.set()

    def join(self, limit_s: float) -> None:
        """Wait for that; for a sink that does not work (its last write failed, or the present one hangs) hardly at all.

        It is left behind then: the thread does not keep the process.
        """
        self._thread.join(min(max(limit_s, 0.0), HOPELESS_S) if self._is_hopeless() else max(limit_s, 0.0))
        if self._thread.is_alive():
            log.warning("spans were still on their way to the %s at the end; %d more were not sent", self._sink.label, len(self._queue))

    def _is_hopeless(self) -> bool:
        began_s = self._began_s
        return self._has_failed or (began_s is not None and time.monotonic() - began_s > HANGS_S)

    def _run(self) -> None:
        while not self._closing.wait(self._sink.every_s):
            self._flush()
        self._flush()
        self._sink.close()

    def _flush(self) -> None:
        while self._queue:
            spans = [self._queue.popleft() for _ in range(min(len(self._queue), BATCH_SPANS))]
            self._began_s = time.monotonic()
            try:
                self._sink.write(spans)
                self._has_failed = False
            except (OSError, ValueError, TypeError) as error:
                self._on_drop(len(spans), self._sink.label)
                self._complain(error)
                self._has_failed = True
            finally:
                self._began_s = None

    def _complain(self, error: Exception) -> None:
        if time.monotonic() - self._complained_s > COMPLAIN_EVERY_S:
            self._complained_s = time.monotonic()
            log.warning("spans dropped on their way to the %s: %s", self._sink.label, error)
