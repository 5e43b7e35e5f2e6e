"""Leaving a faulty device alone for a while."""

from __future__ import annotations

from collections.abc import Callable


class Breaker:
    """Opens after `threshold` faults in a row and stays open for `cool_s`; then one more fault opens it again. The clock is injected."""

    def __init__(self, monotonic: Callable[[], float], threshold: int = 3, cool_s: float = 5.0) -> None:
        self._monotonic = monotonic
        self._threshold = threshold
        self._cool_s = cool_s
        self._num_faults = 0
        self._open_until_s = 0.0
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """True: do not try."""
        return self._monotonic() < self._open_until_s

    def success(self) -> None:
        self._num_faults = 0

    def fault(self) -> None:
        self._num_faults += 1
        if self._num_faults >= self._threshold:
            self._open_until_s = self._monotonic() + self._cool_s
            self._num_faults = self._threshold - 1
            self.num_opened += 1
