"""Least frequently used; among equals, least recently."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

from services.kvstore.policies.base import Capacity, K, Policy


class Lfu(Policy[K]):
    """A queue for every number of uses, and the smallest number that has one: all operations O(1)."""

    name = "lfu"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._num_uses: dict[K, int] = {}
        self._queues: defaultdict[int, OrderedDict[K, None]] = defaultdict(OrderedDict)
        self._fewest = 1
        self._given_up: OrderedDict[K, int] = OrderedDict()
        """Uses of the keys evicted last, at most `capacity` of them: one that is put back has not lost its standing."""

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._given_up.pop(key, None)
        self._num_uses[key] = 1
        self._queues[1][key] = None
        self._fewest = 1

    def access(self, key: K) -> None:
        num_uses = self._leave(key)
        self._num_uses[key] = num_uses + 1
        self._queues[num_uses + 1][key] = None
        if num_uses == self._fewest and num_uses not in self._queues:
            self._fewest += 1

    def evict(self, incoming: K | None = None) -> K:
        if not self._num_uses:
            raise KeyError("nothing is held")
        if self._fewest not in self._queues:
            self._fewest = min(self._queues)  # after a discard; the queues are few
        key = next(iter(self._queues[self._fewest]))
        self._given_up[key] = self._leave(key)
        while len(self._given_up) > self.capacity():
            self._given_up.popitem(last=False)
        return key

    def put_back(self, key: K) -> None:
        """The next to go among those used as often: a popular prefix outlives its suffixes by its own uses."""
        num_uses = self._num_uses[key] = self._given_up.pop(key, 1)
        self._queues[num_uses][key] = None
        self._queues[num_uses].move_to_end(key, last=False)
        self._fewest = min(self._fewest, num_uses)

    def discard(self, key: K) -> None:
        self._leave(key)

    def __len__(self) -> int:
        return len(self._num_uses)

    def _leave(self, key: K) -> int:
        """Out of its queue; returns how often it was used. No empty queue stays."""
        num_uses = self._num_uses.pop(key)
        queue = self._queues[num_uses]
        del queue[key]
        if not queue:
            del self._queues[num_uses]
        return num_uses
