"""Rotary position embedding, the two halves of a head rotated against each other (as in transformers)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shared.engine.model.architecture import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # How often a frequency turns within the original context decides: often = kept, seldom = stretched, between = blended.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return (1.0 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


class Rotation:
    """The rotation of one step's tokens, the same in every layer."""

    def __init__(self, inverse_frequencies: Tensor, positions: Tensor, dtype: torch.dtype) -> None:
        angles = positions.to(torch.float32)[:, None] * inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(dtype)[:, None]  # [N, 1, head_dim]
        self._sin = torch.cat((-sin, sin), dim=-1).to(dtype)[:, None]

    def apply(self, heads: Tensor) -> Tensor:
        """[N, num_heads, head_dim], rotated by each token's position."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * self._cos, swapped, self._sin)
