"""The last product: from hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.engine.model.linear import create_linear

NUM_SHARP = 16
"""Likeliest tokens a row whose logits are computed again: 0.1 ms a row of 49,152 (one core with AMX), as against 0.5 for all of them."""


class Head:
    """Logits in float32, the likeliest of each row as exact as the hidden state allows.

    A product in 16 bits is rounded to 16 bits: bfloat16 has steps of an eighth between 16 and 32, so that the first few tokens of a row
    are often equal, and their order in the vocabulary would choose the text.
    """

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [vocab_size, hidden_size]."""
        self._weight, self._product = weight, create_linear(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] → [N, vocab_size] float32."""
        logits = self._product(hidden).float()
        return logits if hidden.dtype == torch.float32 else self._sharpened(logits, hidden)

    def _sharpened(self, logits: Tensor, hidden: Tensor) -> Tensor:
        likeliest = logits.topk(min(NUM_SHARP, logits.shape[1]), sorted=False).indices
        exact = torch.bmm(self._weight[likeliest].float(), hidden.float().unsqueeze(2)).squeeze(2)
        return logits.scatter_(1, likeliest, exact)
