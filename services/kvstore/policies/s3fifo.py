"""S3-FIFO: a small queue for newcomers, a main queue for what was used again, and ghosts of what left the small one too early.

Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023; with the sizes of its reference implementation.
"""

from __future__ import annotations

from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy

_SMALL = 0.1
_GHOST = 0.9
_PROMOTE_AT = 2
"""Uses in the small queue that earn a place in the main one."""
_MAX_USES = 3


class S3Fifo(Policy[K]):
    """Each queue maps a key to its uses since it entered."""

    name = "s3fifo"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[K, int] = OrderedDict()
        self._main: OrderedDict[K, int] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._has_evicted = False
        self._returning: K | None = None
        """The missed key that was a ghost, until it is admitted."""
        self._parked: dict[K, bool] = {}
        """Whether it came out of the small queue."""
        self._last_was_small = False

    def admit(self, key: K, cost: float = 1.0) -> None:
        if key == self._returning or key in self._ghosts:
            self._ghosts.pop(key, None)
            self._main[key] = 0
        elif not self._has_evicted and len(self._small) >= self._small_size():
            self._main[key] = 0
        else:
            self._small[key] = 0
        self._returning = None

    def access(self, key: K) -> None:
        queue = self._small if key in self._small else self._main
        queue[key] += 1

    def evict(self, incoming: K | None = None) -> K:
        self._has_evicted = True
        if incoming is not None and incoming in self._ghosts:
            del self._ghosts[incoming]
            self._returning = incoming
        while True:
            if self._small and (not self._main or len(self._main) <= self.capacity() - self._small_size()):
                key = self._evict_small()
            else:
                key = self._evict_main()
            if key is not None:
                return key

    def _evict_small(self) -> K | None:
        """One step: a key that goes, or None if it was promoted."""
        key, uses = self._small.popitem(last=False)
        if uses >= _PROMOTE_AT:
            self._main[key] = 0
            return None
        self._ghosts[key] = None
        while len(self._ghosts) > max(int(self.capacity() * _GHOST), 1):
            self._ghosts.popitem(last=False)
        self._last_was_small = True
        return key

    def _evict_main(self) -> K | None:
        """One step: a key that goes, or None if it stays for a use that it had."""
        key, uses = self._main.popitem(last=False)
        if uses:
            self._main[key] = min(uses, _MAX_USES) - 1
            return None
        self._last_was_small = False
        return key

    def park(self, key: K) -> None:
        self._ghosts.pop(key, None)
        self._parked[key] = self._last_was_small

    def put_back(self, key: K) -> None:
        queue = self._small if self._parked.pop(key) else self._main
        queue[key] = 0
        queue.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        del (self._small if key in self._small else self._main)[key]

    def _small_size(self) -> int:
        return max(int(self.capacity() * _SMALL), 1)

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
