"""What a decision weighs, and how it is told afterwards."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from services.router.load import Floats, Pool
from shared.types import InstanceId

MAX_WEIGHT = 1e6
NUM_TOLD = 4
"""Candidates of one decision that are told."""
TOLD_ROW, TOLD_SCORE, TOLD_FEATURES = range(3)
"""Columns of what is told; the features are the last."""


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the features of a candidate, in their order.

    The default is the classic cost in blocks (uncached prefill + what is active), with two changes that the scenarios ask for. Computing a
    block again costs everybody behind it: it weighs twice what queues. Active blocks weigh a tenth: decoding holds up a prompt far less
    than prompts do.
    """

    uncached_blocks: float = 2.0
    load_blocks: float = 0.0
    """Blocks that its host holds and its own pool does not."""
    queued_blocks: float = 1.0
    active_blocks: float = 0.1
    active_requests: float = 0.0
    memory_used: float = 0.0
    """Share of the device pool."""
    utilisation: float = 0.0
    latency_s: float = 0.0

    def vector(self) -> Floats:
        """[num_features] Raises ValueError naming the weight that is no number of a sane size."""
        for name in self.__struct_fields__:
            if not abs(getattr(self, name)) <= MAX_WEIGHT:  # NaN is not
                raise ValueError(f"weight {name} is {getattr(self, name)}")
        return np.array(msgspec.structs.astuple(self), dtype=np.float64)


class ClassWeights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the requests of each class; none may be missing."""

    high: Weights
    normal: Weights
    batch: Weights


DEFAULT_WEIGHTS = ClassWeights(Weights(), Weights(), Weights())


class Candidate(NamedTuple):
    """A decode worker as it was seen for one request. Features as in `Weights`."""

    worker: InstanceId
    score: float
    features: tuple[float, ...]

    def __str__(self) -> str:
        told = (f"{name}={value:g}" for name, value in zip(Weights.__struct_fields__, self.features, strict=True) if value)
        return f"{self.worker}:{self.score:.1f}({' '.join(told)})"


class View(NamedTuple):
    """The best candidates of one decision as a choice tells them: put into words later, if at all."""

    pool: Pool
    told: Floats
    """[at most NUM_TOLD, 2 + num_features]"""

    def candidates(self) -> list[Candidate]:
        """The chosen one first, then the lowest scores."""
        return [
            Candidate(self.pool.states[int(row[TOLD_ROW])].lease.instance, row[TOLD_SCORE], tuple(row[TOLD_FEATURES:]))
            for row in self.told.tolist()
        ]
