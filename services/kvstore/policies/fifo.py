"""First in, first out."""

from __future__ import annotations

from services.kvstore.policies.base import K
from services.kvstore.policies.lru import Lru


class Fifo(Lru[K]):
    """One queue; a use changes nothing."""

    name = "fifo"

    def access(self, key: K) -> None:
        if key not in self._queue:
            raise KeyError(key)
