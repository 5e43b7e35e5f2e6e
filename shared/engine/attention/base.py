"""The attention contract: planned on the host once a step, run on the device once a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from shared.engine.batch import AttentionPlan
from shared.engine.paged_cache import PagedKvCache


class AttentionShape(NamedTuple):
    """What every layer has in common, and where layers differ."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it before the softmax."""
    windows: tuple[int, ...]
    """[num_layers]: tokens that a token sees, itself included; 0: all before it."""


class AttentionBackend(ABC):
    """Causal attention of ragged batches over the paged pool. One step: `plan`, then `run` for each layer in order."""

    def __init__(self, shape: AttentionShape, cache: PagedKvCache) -> None:
        self.shape = shape
        self.cache = cache

    @abstractmethod
    def plan(self, plan: AttentionPlan) -> None:
        """Prepare a step: copy the block tables to the device, choose kernels. Valid until the next `plan`."""

    @abstractmethod
    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write this step's K and V of `layer` into the pool, then attend.

        query [N, num_heads, head_dim]; key, value [N, num_kv_heads, head_dim], rope applied; N tokens as `plan` gave them.
        Returns [N, num_heads * head_dim]. Touches no block outside the plan.
        """
