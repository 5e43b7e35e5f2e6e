"""How long to wait before a dead service is started again."""

from __future__ import annotations

from collections.abc import Callable


class Backoff:
    """0.5 s, doubling to 30 s; from the start again once a life lasted `healthy_s`."""

    def __init__(self, monotonic: Callable[[], float], *, first_s: float = 0.5, longest_s: float = 30.0, healthy_s: float = 60.0) -> None:
        self._monotonic = monotonic
        self._first_s = first_s
        self._longest_s = longest_s
        self._healthy_s = healthy_s
        self._started_s = monotonic()
        self.num_restarts = 0
        """Restarts in a row."""

    def started(self) -> None:
        """A life begins."""
        self._started_s = self._monotonic()

    def next_delay_s(self) -> float:
        """It ended: seconds to wait before the next."""
        if self._monotonic() - self._started_s >= self._healthy_s:
            self.num_restarts = 0
        delay_s = min(self._first_s * 2.0**self.num_restarts, self._longest_s)
        self.num_restarts += 1
        return delay_s
