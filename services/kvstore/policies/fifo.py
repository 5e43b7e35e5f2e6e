"""First in, first out."""

from __future__ import annotations

from services.kvstore.policies.base import K
from services.kvstore.policies.lru import Lru


class Fifo(Lru[K]):
    """LRU's queue, in which a use moves nothing."""

    name = "fifo"

    def access(self, key: K) -> None:
        assert key in self._queue
