"""How fast a tier reads, measured over whatever queue there is."""

from __future__ import annotations

import time

from shared.ewma import Ewma


class Throughput:
    """`begin` and `end` stand around each read; reads overlap."""

    def __init__(self) -> None:
        self._bytes_per_s = Ewma()
        self._queued_bytes = 0

    def begin(self, num_bytes: int) -> float:
        """A read joins the queue; returns when, for `measure`."""
        self._queued_bytes += num_bytes
        return time.perf_counter()

    def measure(self, begun_s: float) -> None:
        """The disk is done with the read that began then: it took all that is queued along."""
        self._bytes_per_s.add(self._queued_bytes / (time.perf_counter() - begun_s))

    def end(self, num_bytes: int) -> None:
        self._queued_bytes -= num_bytes

    def estimate_s(self, num_bytes: int) -> float:
        """How long `num_bytes` more would take; 0 while unknown."""
        return (self._queued_bytes + num_bytes) / self._bytes_per_s.value if self._bytes_per_s.value else 0.0
