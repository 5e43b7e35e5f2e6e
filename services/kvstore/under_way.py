"""Blocks that are not here yet but will be. Pure: the clock is injected."""

from __future__ import annotations

from collections.abc import Callable, Iterable

ANNOUNCED_S = 5.0


class UnderWay:
    """Keys being written into slots of this host, and keys that another host has said it sends."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._written: set[bytes] = set()
        self._announced: dict[bytes, float] = {}
        """Key → until when it is believed to come."""
        self.on_arrival: Callable[[bytes], None] = lambda key: None
        """A key that was under way is here, or will not come."""

    def begin(self, key: bytes) -> None:
        """A slot is reserved for the block."""
        self._written.add(key)

    def end(self, key: bytes) -> None:
        """It is committed, or given up: nobody waits for it any longer."""
        self._written.discard(key)
        self._announced.pop(key, None)
        self.on_arrival(key)

    def announce(self, keys: Iterable[bytes]) -> None:
        """Another host sends these; forgotten after ANNOUNCED_S."""
        deadline_s = self._monotonic() + ANNOUNCED_S
        for key in keys:
            self._announced[key] = deadline_s

    def is_written(self, key: bytes) -> bool:
        """Somebody has a slot for it already."""
        return key in self._written

    def is_expected(self, key: bytes) -> bool:
        """Whether it makes sense to wait for it."""
        return key in self._written or key in self._announced

    def run_out(self) -> None:
        """Forget announcements that nothing came of."""
        now = self._monotonic()
        for key in [key for key, deadline_s in self._announced.items() if deadline_s <= now]:
            del self._announced[key]
            if key not in self._written:
                self.on_arrival(key)
