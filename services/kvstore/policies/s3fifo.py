"""S3-FIFO: a small queue that filters what is used once, a main queue, and a ghost list (Yang et al., SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9
MOST_USES = 3
MOVE_TO_MAIN_USES = 2


class S3Fifo(Policy[K]):
    """New keys enter the small queue; leaving it, a key used at least twice moves to the main queue, another becomes a ghost.

    A missed key that is a ghost enters the main queue at once. The main queue gives a used key another round.
    """

    name = "s3fifo"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[K, int] = OrderedDict()
        """Key → uses since it entered, oldest first."""
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._has_evicted = False

    @property
    def _small_capacity(self) -> int:
        return max(int(self.capacity() * SMALL_SHARE), 1)

    @property
    def _main_capacity(self) -> int:
        return self.capacity() - self._small_capacity

    def admit(self, key: K, cost: float = 1.0) -> None:
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = 0
        elif not self._has_evicted and len(self._small) >= self._small_capacity:
            self._main[key] = 0  # while the tier fills for the first time, nothing needs the filter
        else:
            self._small[key] = 0

    def access(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, MOST_USES)

    def evict(self, incoming: K | None = None) -> K:
        self._has_evicted = True
        if self._small and len(self._main) <= self._main_capacity:
            key = self._evict_small()
            if key is not None:
                return key
        return self._evict_main()

    def put_back(self, key: K) -> None:
        """To the head of the small queue, unused: the next to leave it. A ghost no longer."""
        self._ghosts.pop(key, None)
        self._small[key] = 0
        self._small.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        if self._small.pop(key, None) is None:
            del self._main[key]

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def _evict_small(self) -> K | None:
        """None: everything in the small queue had been used and moved to the main one."""
        while self._small:
            key, num_uses = self._small.popitem(last=False)
            if num_uses < MOVE_TO_MAIN_USES:
                self._remember(key)
                return key
            self._main[key] = num_uses
        return None

    def _evict_main(self) -> K:
        if not self._main:
            self._main, self._small = self._small, self._main  # KeyError below if both are empty
        while True:
            key, num_uses = self._main.popitem(last=False)
            if num_uses == 0:
                return key
            self._main[key] = num_uses - 1

    def _remember(self, key: K) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > self.capacity() * GHOST_SHARE:
            self._ghosts.popitem(last=False)
