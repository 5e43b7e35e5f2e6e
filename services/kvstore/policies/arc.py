"""ARC, adaptive replacement (Megiddo and Modha, FAST 2003): two LRU queues and their ghosts share the room by what would have hit."""

from __future__ import annotations

from collections import OrderedDict

from services.kvstore.policies.base import Capacity, K, Policy


class Arc(Policy[K]):
    """`once` and `often` (T1, T2) hold keys used once and more often; `once_ghosts` and `often_ghosts` (B1, B2) remember what they gave up.

    A miss that is a ghost of `once` says that `once` was too small, one of `often` the opposite: `target` (p), what `once` should have,
    follows.
    """

    name = "arc"

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[K, None] = OrderedDict()
        self._often: OrderedDict[K, None] = OrderedDict()
        self._once_ghosts: OrderedDict[K, None] = OrderedDict()
        self._often_ghosts: OrderedDict[K, None] = OrderedDict()
        self._target = 0.0
        self._adapted_for: K | None = None
        """The missed ghost that has moved the target already: one miss may evict several times."""

    def admit(self, key: K, cost: float = 1.0) -> None:
        self._adapt(key)
        self._adapted_for = None
        was_ghost = key in self._once_ghosts or key in self._often_ghosts
        self._once_ghosts.pop(key, None)
        self._often_ghosts.pop(key, None)
        (self._often if was_ghost else self._once)[key] = None

    def access(self, key: K) -> None:
        self._once.pop(key, None)
        self._often[key] = None
        self._often.move_to_end(key)

    def evict(self, incoming: K | None = None) -> K:
        if not self._once and not self._often:
            raise KeyError("nothing is held")
        if incoming is not None and (incoming in self._once_ghosts or incoming in self._often_ghosts):
            self._adapt(incoming)
            return self._replace(is_often_ghost=incoming in self._often_ghosts)
        if len(self._once) + len(self._once_ghosts) >= self.capacity():
            if not self._once_ghosts:
                return self._once.popitem(last=False)[0]  # once alone fills the room: its oldest leaves no ghost
            self._once_ghosts.popitem(last=False)
        elif self._num_remembered >= 2 * self.capacity() and self._often_ghosts:
            self._often_ghosts.popitem(last=False)
        return self._replace(is_often_ghost=False)

    def put_back(self, key: K) -> None:
        """To the head of `once`. A ghost no longer."""
        self._once_ghosts.pop(key, None)
        self._often_ghosts.pop(key, None)
        self._once[key] = None
        self._once.move_to_end(key, last=False)

    def discard(self, key: K) -> None:
        queue = self._once if key in self._once else self._often
        del queue[key]

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    @property
    def _num_remembered(self) -> int:
        return len(self) + len(self._once_ghosts) + len(self._often_ghosts)

    def _adapt(self, key: K) -> None:
        if key == self._adapted_for:
            return
        if key in self._once_ghosts:
            step = max(len(self._often_ghosts) / len(self._once_ghosts), 1.0)
            self._target = min(self._target + step, float(self.capacity()))
        elif key in self._often_ghosts:
            step = max(len(self._once_ghosts) / len(self._often_ghosts), 1.0)
            self._target = max(self._target - step, 0.0)
        self._adapted_for = key

    def _replace(self, *, is_often_ghost: bool) -> K:
        size = len(self._once)
        if size and (size > self._target or (is_often_ghost and size == int(self._target)) or not self._often):
            key, _ = self._once.popitem(last=False)
            self._once_ghosts[key] = None
        else:
            key, _ = self._often.popitem(last=False)
            self._often_ghosts[key] = None
        return key
