"""Attention in plain torch: gather a group of sequences' blocks, then scaled_dot_product_attention. The oracle for the faster ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.attention.base import AttentionBackend, AttentionShape
from shared.engine.batch import AttentionPlan
from shared.engine.paged_cache import PagedKvCache


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences computed by one call: B sequences of n new tokens each, block tables padded to T blocks."""

    rows: Tensor | slice
    """[B * n] rows of the step's tokens, sequence by sequence."""
    num_sequences: int
    num_new: int
    block_rows: Tensor
    """[num_layers, 2 * B * T] rows of the cache's `block_rows`: K of all, then V of all."""
    masks: dict[int, Tensor]
    """Window → [B, 1, n, T * block_size]: 0 where a token may look, -inf elsewhere."""
    gathered: Tensor
    """[2 * B * T, block_size * num_kv_heads * head_dim] room for one layer's K and V."""


class ReferenceAttention(AttentionBackend):
    """Sequences with one new token are computed together where their lengths are alike; all others one by one."""

    def __init__(self, shape: AttentionShape, cache: PagedKvCache) -> None:
        super().__init__(shape, cache)
        self._groups: list[_Group] = []
        self._write_rows = torch.empty(0, dtype=torch.int64)
        self._room = cache.block_rows.new_empty(0)

    def plan(self, plan: AttentionPlan) -> None:
        device = self.cache.pool.device
        self._write_rows = torch.from_numpy(self.cache.rows_of_slots(plan.slots)).to(device)
        groups = list(_alike(plan))
        num_rows = max((2 * len(group) * int(np.diff(plan.kv_indptr)[group].max()) for group in groups), default=0)
        if self._room.numel() < num_rows * self.cache.block_rows.shape[1]:
            self._room = self.cache.block_rows.new_empty(num_rows * self.cache.block_rows.shape[1])
        self._groups = [self._group(plan, group) for group in groups]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        token_rows = self.cache.token_rows
        token_rows.index_copy_(0, self._write_rows[layer, 0], key.reshape(len(key), -1))
        token_rows.index_copy_(0, self._write_rows[layer, 1], value.reshape(len(value), -1))
        if len(self._groups) == 1:
            return self._attend(layer, self._groups[0], query)
        out = query.new_empty((len(query), self.shape.num_heads * self.shape.head_dim))
        for group in self._groups:
            out[group.rows] = self._attend(layer, group, query[group.rows])
        return out

    def _attend(self, layer: int, group: _Group, query: Tensor) -> Tensor:
        """[B * n, num_heads, head_dim] → [B * n, num_heads * head_dim]."""
        num_heads, num_kv_heads, head_dim, scale, windows = self.shape
        torch.index_select(self.cache.block_rows, 0, group.block_rows[layer], out=group.gathered)
        keys, values = group.gathered.view(2, group.num_sequences, -1, num_kv_heads, head_dim).transpose(2, 3)
        mask = group.masks[windows[layer]]
        if group.num_new == 1:  # the heads that share a KV head attend as if they were its tokens: K and V are read once
            query = query.view(group.num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
            return F.scaled_dot_product_attention(query, keys, values, mask, scale=scale).reshape(len(query), -1)
        query = query.view(group.num_sequences, group.num_new, num_heads, head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=num_heads != num_kv_heads)
        return out.transpose(1, 2).reshape(group.num_sequences * group.num_new, -1)

    def _group(self, plan: AttentionPlan, group: NDArray[np.int64]) -> _Group:
        tables = [plan.kv_indices[plan.kv_indptr[index] : plan.kv_indptr[index + 1]] for index in group]
        num_blocks = max(len(table) for table in tables)
        # A shorter table is filled up with its own first block: masked, but its numbers must be this sequence's own.
        padded = np.stack([np.concatenate([table, np.full(num_blocks - len(table), table[0])]) for table in tables])
        block_rows = self.cache.rows_of_blocks(padded.ravel()).reshape(self.cache.layout.num_layers, -1)
        starts, ends = plan.qo_indptr[group], plan.qo_indptr[group + 1]
        rows = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
        positions = plan.positions[rows].reshape(len(group), -1)
        device = self.cache.pool.device
        return _Group(
            rows=slice(int(rows[0]), int(rows[-1]) + 1) if rows[-1] - rows[0] == len(rows) - 1 else torch.from_numpy(rows).to(device),
            num_sequences=len(group),
            num_new=positions.shape[1],
            block_rows=torch.from_numpy(block_rows).to(device),
            masks={window: self._mask(positions, num_blocks * plan.block_size, window) for window in set(self.shape.windows)},
            gathered=self._room[: block_rows.shape[1] * self.cache.block_rows.shape[1]].view(block_rows.shape[1], -1),
        )

    def _mask(self, positions: NDArray[np.int32], num_keys: int, window: int) -> Tensor:
        """[B, 1, n, num_keys]. Padding lies behind every position, so causality hides it too."""
        keys = np.arange(num_keys, dtype=np.int32)
        hidden = keys > positions[..., None]
        if window:
            hidden |= keys <= positions[..., None] - window
        mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))[:, None]
        return torch.from_numpy(mask).to(self.cache.pool.device, self.cache.pool.dtype)


def _alike(plan: AttentionPlan) -> Iterator[NDArray[np.int64]]:
    """Indexes of the sequences that are computed together: one new token each, and block tables within a factor of two."""
    num_new, num_blocks = np.diff(plan.qo_indptr), np.diff(plan.kv_indptr)
    for index in np.flatnonzero(num_new > 1):
        yield np.array([index], dtype=np.int64)
    single = np.flatnonzero(num_new == 1)
    scale = np.frexp(num_blocks[single].astype(np.float64))[1]
    for size in np.unique(scale):
        yield single[scale == size]
