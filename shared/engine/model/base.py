"""The model contract: what the engine asks of a forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from shared.engine.attention.base import AttentionBackend, AttentionShape


class Model(ABC):
    """A decoder over ragged batches; it holds weights and no state of any sequence."""

    attention_shape: AttentionShape

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """[N] ids at [N] positions → [N, hidden_size] after the last norm. `attention` is planned for these tokens."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden_size] → [S, vocab_size] float32."""
