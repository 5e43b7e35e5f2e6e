"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy


class Lru(Policy[K]):
    """One queue; a use moves to its end."""

    name = "lru"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._queue: OrderedDict[K, None] = OrderedDict()

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._queue[key] = None

    def access(self, key: K) -> None:
        self._queue.move_to_end(key)

    def evict(self, incoming: K | None = None) -> K:
        return self._queue.popitem(last=False)[0]

    def park(self, key: K) -> None:
        """Nothing to remember: it goes back to the front."""

    def put_back(self, key: K) -> None:
        self._queue[key] = None
        self._queue.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        del self._queue[key]

    def __len__(self) -> int:
        return len(self._queue)
