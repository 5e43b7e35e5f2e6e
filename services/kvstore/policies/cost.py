"""The cheapest to compute again goes first, with ageing (GreedyDual, Young 1994; Cao and Irani, USITS 1997)."""

from __future__ import annotations

import heapq
from itertools import count

from services.kvstore.policies.base import Capacity, K, Policy


class Cost(Policy[K]):
    """A key's credit is what it costs to compute again plus the credit of the last one that went, renewed by each use.

    So a dear block outlives cheap ones, but not for ever. A heap with lazy deletion: O(log n), a few µs at a million blocks.
    """

    name = "cost"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._costs: dict[K, float] = {}
        self._entries: dict[K, int] = {}
        """Key → the number of its valid heap entry."""
        self._heap: list[tuple[float, int, K]] = []
        self._number = count()
        self._age = 0.0

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._costs[key] = cost
        self._push(key, self._age + cost)

    def access(self, key: K) -> None:
        self._push(key, self._age + self._costs[key])

    def evict(self, incoming: K | None = None) -> K:
        while self._heap:
            credit, number, key = heapq.heappop(self._heap)
            if self._entries.get(key) == number:
                self._age = max(self._age, credit)
                self.discard(key)
                return key
        raise KeyError("nothing is held")

    def put_back(self, key: K) -> None:
        """With the credit of the last one that went: the next to go. Its cost is learned again when it is admitted again."""
        self._costs[key] = 1.0
        self._push(key, -1.0)

    def discard(self, key: K) -> None:
        del self._costs[key]
        del self._entries[key]

    def __len__(self) -> int:
        return len(self._costs)

    def _push(self, key: K, credit: float) -> None:
        number = self._entries[key] = next(self._number)
        heapq.heappush(self._heap, (credit, number, key))
        if len(self._heap) > 4 * len(self._entries) + 64:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
