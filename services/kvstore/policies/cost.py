"""What is cheap to compute again goes first: GreedyDual over recompute cost per byte, with costs rounded to a few classes.

A key's worth is its cost plus the inflation at its last use; the inflation is the worth of the last key that went. Within a class of equal
cost, worth grows with the time of use, so each class is a plain queue and the cheapest key is at the head of one of them: O(1).
Cherkasova, "Improving WWW proxies performance with greedy-dual-size-frequency", HP Labs 1998; Ghandeharizadeh et al., "CAMP", 2014.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy

_CLASSES_PER_DOUBLING = 2


class Cost(Policy[K]):
    """Queues by rounded cost; each maps a key to its worth."""

    name = "cost"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._queues: dict[int, OrderedDict[K, float]] = {}
        self._class: dict[K, int] = {}
        self._inflation = 0.0
        self._last: tuple[int, float] = (0, 0.0)
        self._parked: dict[K, tuple[int, float]] = {}

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._use(key, round(_CLASSES_PER_DOUBLING * math.log2(max(cost, 1e-9))))

    def access(self, key: K) -> None:
        self._use(key, self._take(key)[0])

    def _use(self, key: K, cost_class: int) -> None:
        self._class[key] = cost_class
        self._queues.setdefault(cost_class, OrderedDict())[key] = self._inflation + 2.0 ** (cost_class / _CLASSES_PER_DOUBLING)

    def _take(self, key: K) -> tuple[int, float]:
        cost_class = self._class.pop(key)
        queue = self._queues[cost_class]
        worth = queue.pop(key)
        if not queue:
            del self._queues[cost_class]
        return cost_class, worth

    def evict(self, incoming: K | None = None) -> K:
        if not self._queues:
            raise KeyError("nothing is held")
        worth, _, key = min(
            ((next(iter(queue.values())), cost_class, next(iter(queue))) for cost_class, queue in self._queues.items()), key=_worth
        )
        self._inflation = max(self._inflation, worth)
        self._last = self._take(key)
        return key

    def park(self, key: K) -> None:
        self._parked[key] = self._last

    def put_back(self, key: K) -> None:
        cost_class, worth = self._parked.pop(key)
        self._class[key] = cost_class
        queue = self._queues.setdefault(cost_class, OrderedDict())
        queue[key] = worth
        queue.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        self._take(key)

    def __len__(self) -> int:
        return len(self._class)


def _worth(head: tuple[float, int, object]) -> tuple[float, int]:
    return head[:2]
