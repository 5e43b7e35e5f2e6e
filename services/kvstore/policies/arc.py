"""ARC: recency and frequency share the room, and ghosts say which of the two should have had more.

Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003; the names t1, t2, b1, b2 and p are the paper's.
"""

from __future__ import annotations

from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy


class Arc(Policy[K]):
    """t1: used once lately; t2: used again; b1, b2: keys that left them. p: the size that t1 should have."""

    name = "arc"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._t1: OrderedDict[K, None] = OrderedDict()
        self._t2: OrderedDict[K, None] = OrderedDict()
        self._b1: OrderedDict[K, None] = OrderedDict()
        self._b2: OrderedDict[K, None] = OrderedDict()
        self._p = 0.0
        self._returning: K | None = None
        """The missed key that was a ghost: it goes to t2 when it is admitted."""
        self._returning_from_b2 = False
        self._parked: dict[K, bool] = {}
        """Whether it came out of t1."""
        self._last_was_t1 = False

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._notice(key)
        if key == self._returning:
            self._t2[key] = None
        else:
            self._t1[key] = None
        self._returning = None
        self._trim(self.capacity())

    def access(self, key: K) -> None:
        if key in self._t1:
            del self._t1[key]
            self._t2[key] = None
        else:
            self._t2.move_to_end(key)

    def evict(self, incoming: K | None = None) -> K:
        if not self._t1 and not self._t2:
            raise KeyError("nothing is held")
        if incoming is not None:
            self._notice(incoming)
        is_new = self._returning is None
        if is_new and len(self._t1) >= self.capacity():
            self._last_was_t1 = True
            return self._t1.popitem(last=False)[0]  # b1 is empty: there is no room for a ghost either
        if is_new and self._b1 and len(self._t1) + len(self._b1) >= self.capacity():
            self._b1.popitem(last=False)
        return self._replace()

    def _notice(self, key: K) -> None:
        """A miss: if the key is a ghost, learn from it, once."""
        if key in self._b1:
            self._p = min(self._p + max(len(self._b2) / len(self._b1), 1.0), float(self.capacity()))
            del self._b1[key]
            self._returning, self._returning_from_b2 = key, False
        elif key in self._b2:
            self._p = max(self._p - max(len(self._b1) / len(self._b2), 1.0), 0.0)
            del self._b2[key]
            self._returning, self._returning_from_b2 = key, True
        elif key != self._returning:
            self._returning = None

    def _replace(self) -> K:
        size = len(self._t1)
        from_b2 = self._returning is not None and self._returning_from_b2
        self._last_was_t1 = bool(size) and (size > self._p or (from_b2 and size == int(self._p)) or not self._t2)
        queue, ghosts = (self._t1, self._b1) if self._last_was_t1 else (self._t2, self._b2)
        key, _ = queue.popitem(last=False)
        ghosts[key] = None
        return key

    def _trim(self, capacity: int) -> None:
        """Ghosts and held keys together are at most twice the capacity."""
        while self._b1 and len(self._t1) + len(self._b1) > capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self) + len(self._b1) + len(self._b2) > 2 * capacity:
            self._b2.popitem(last=False)

    def park(self, key: K) -> None:
        self._b1.pop(key, None)
        self._b2.pop(key, None)
        self._parked[key] = self._last_was_t1

    def put_back(self, key: K) -> None:
        queue = self._t1 if self._parked.pop(key) else self._t2
        queue[key] = None
        queue.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        del (self._t1 if key in self._t1 else self._t2)[key]

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)
