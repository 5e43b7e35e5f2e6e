"""Least frequently used; among equals, least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from services.kvstore.policies.base import Capacity, K, Policy


class _Level:
    """The keys of one frequency, in a list of levels by frequency."""

    __slots__ = ("above", "below", "frequency", "queue")

    def __init__(self, frequency: int) -> None:
        self.frequency = frequency
        self.queue: OrderedDict[Hashable, None] = OrderedDict()
        self.below = self
        self.above = self


class Lfu(Policy[K]):
    """A ring of levels, lowest frequency first; a use moves a key to the next one."""

    name = "lfu"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._ends = _Level(0)
        """`above` is the lowest level, `below` the highest."""
        self._level: dict[K, _Level] = {}
        self._frequency_of_last = 0
        self._parked: dict[K, int] = {}

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._add(key, self._level_after(self._ends, 1))

    def access(self, key: K) -> None:
        level = self._level[key]
        higher = self._level_after(level, level.frequency + 1)
        self._take(key)
        self._add(key, higher)

    def evict(self, incoming: K | None = None) -> K:
        level = self._ends.above
        if level is self._ends:
            raise KeyError("nothing is held")
        key: K = next(iter(level.queue))  # type: ignore[assignment]  # a level holds only our keys
        self._frequency_of_last = level.frequency
        self._take(key)
        return key

    def park(self, key: K) -> None:
        self._parked[key] = self._frequency_of_last

    def put_back(self, key: K) -> None:
        frequency = self._parked.pop(key)
        level = self._ends
        while level.above is not self._ends and level.above.frequency <= frequency:
            level = level.above
        if level.frequency != frequency:
            level = self._level_after(level, frequency)
        self._add(key, level)
        level.queue.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        self._take(key)

    def __len__(self) -> int:
        return len(self._level)

    def _level_after(self, level: _Level, frequency: int) -> _Level:
        """The level of `frequency`, which belongs right above `level`."""
        if level.above.frequency == frequency:
            return level.above
        made = _Level(frequency)
        made.below, made.above = level, level.above
        level.above.below = made
        level.above = made
        return made

    def _add(self, key: K, level: _Level) -> None:
        level.queue[key] = None
        self._level[key] = level

    def _take(self, key: K) -> None:
        level = self._level.pop(key)
        del level.queue[key]
        if not level.queue:
            level.below.above = level.above
            level.above.below = level.below
