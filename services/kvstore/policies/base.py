"""The contract of an eviction policy. It sees keys only.

That suffixes go before their parents is the tier's business (`tiers/index.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

Capacity = Callable[[], int]
"""How many blocks the policy's share of the tier holds at most, now; sizes queues and ghost lists."""


class Policy(ABC, Generic[K]):
    """The order in which held keys are given up. Every operation is O(1) amortised.

    A miss on a full tier calls `evict` (as often as it takes) and then `admit`; a hit calls `access`.
    """

    name: str

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity

    @abstractmethod
    def admit(self, key: K, cost: float = 1.0) -> None:
        """A key that is not held is held from now on. `cost`: of computing it again, per byte."""

    @abstractmethod
    def access(self, key: K) -> None:
        """A held key was used."""

    @abstractmethod
    def evict(self, incoming: K | None = None) -> K:
        """Take out the key that goes first. `incoming`: the missed key that needs the room. Raises KeyError if nothing is held."""

    @abstractmethod
    def park(self, key: K) -> None:
        """The key that `evict` just returned cannot go yet: it is neither held nor gone until `put_back`."""

    @abstractmethod
    def put_back(self, key: K) -> None:
        """Hold a parked key again, as the next to go."""

    @abstractmethod
    def discard(self, key: K) -> None:
        """Forget a held key without trace (dropped, not evicted)."""

    @abstractmethod
    def __len__(self) -> int:
        """Keys held; ghosts do not count."""
