"""What the index knows of one event source, and how it speaks of holders."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages.kv import KvEventBatch
from shared.types import Tier

Runs = list[tuple[int, int]]
SourceState = Literal["EXACT", "DEGRADED"]


class Holder(NamedTuple):
    """A tier of a source."""

    source: str
    tier: Tier


class Lengths(NamedTuple):
    """The leading run of one prompt at each holder, and where it lies in memory."""

    by_bit: NDArray[np.int32]
    address: int

    @classmethod
    def zeros(cls, count: int) -> Lengths:
        by_bit = np.zeros(count, dtype=np.int32)
        return cls(by_bit, by_bit.ctypes.data)


class Source:
    """What the index knows of one event source."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: SourceState = "DEGRADED"
        self.epoch = 0
        self.sequence = 0
        self.bits: dict[Tier, int] = {}
        self.num_clears = 0
        """How often all it held was forgotten."""
        self.buffered: list[KvEventBatch] = []
