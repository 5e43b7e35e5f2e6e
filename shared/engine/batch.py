"""One step of work, planned on the host in plain numpy: what attention backends and the model are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.engine.sequence import Sequence

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class BatchItem(NamedTuple):
    """Compute `num_tokens` tokens of `sequence` from position num_computed_tokens on; its block table covers them already."""

    sequence: Sequence
    num_tokens: int
    sample: bool
    """Sample the token after the last computed one (only if that is the sequence's last)."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The CSR block table of one step, in FlashInfer's terms. B sequences, N tokens; all numpy on the host, int32."""

    qo_indptr: Int32
    """[B + 1]: tokens of sequence b are rows qo_indptr[b]:qo_indptr[b + 1]."""
    kv_indptr: Int32
    """[B + 1]: its blocks are kv_indices[kv_indptr[b]:kv_indptr[b + 1]]."""
    kv_indices: Int32
    """[sum of blocks]: block numbers in the pool."""
    kv_last_page_len: Int32
    """[B]: tokens in its last block, the new ones included; 1..block_size."""
    positions: Int32
    """[N]: position of each token in its sequence."""
    slots: Int64
    """[N]: where its K and V go: block number * block_size + offset."""
    block_size: int

    @property
    def kv_lens(self) -> Int32:
        """[B]: context of each sequence, the new tokens included."""
        lens = (np.diff(self.kv_indptr) - 1) * self.block_size + self.kv_last_page_len
        return lens.astype(np.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """The items of one step, in order."""

    items: list[BatchItem]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)

    def input_ids(self) -> Int64:
        """[N] token ids to compute."""
        ids: list[int] = []
        for sequence, num_tokens, _ in self.items:
            start = sequence.num_computed_tokens
            ids.extend(sequence.token_ids[start : start + num_tokens])
        return np.array(ids, dtype=np.int64)

    def plan(self, block_size: int) -> AttentionPlan:
        """The block tables of this step."""
        num_new = np.array([item.num_tokens for item in self.items], dtype=np.int32)
        ends = np.array([item.sequence.num_computed_tokens for item in self.items], dtype=np.int32) + num_new
        num_blocks = (ends + block_size - 1) // block_size
        tables = [item.sequence.block_table[:count] for item, count in zip(self.items, num_blocks.tolist(), strict=True)]
        positions = np.concatenate([np.arange(end - new, end, dtype=np.int32) for new, end in zip(num_new, ends, strict=True)])
        slots = np.concatenate(
            [
                np.asarray(table, dtype=np.int64)[span // block_size] * block_size + span % block_size
                for table, span in zip(tables, np.split(positions, np.cumsum(num_new)[:-1]), strict=True)
            ]
        )
        return AttentionPlan(
            qo_indptr=_indptr(num_new),
            kv_indptr=_indptr(num_blocks),
            kv_indices=np.array([block for table in tables for block in table], dtype=np.int32),
            kv_last_page_len=((ends - 1) % block_size + 1).astype(np.int32),
            positions=positions,
            slots=slots,
            block_size=block_size,
        )


def _indptr(counts: Int32) -> Int32:
    return np.concatenate([np.zeros(1, dtype=np.int32), np.cumsum(counts, dtype=np.int32)])
