"""The paged KV pool: blocks in device memory, written by token and copied out and in by block."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import EngineError
from shared.kv.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

STAGING_BYTES = 32 * 2**20
"""Pinned memory between a GPU and the host, for as many blocks as fit."""


class PagedKvCache:
    """`pool` is `[num_blocks, num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]`, zeros at first: attention reads whole blocks and
    masks what lies behind a sequence's end, so every number in the pool must be finite.

    `export_blocks` and `import_blocks` may run in another thread than the forward pass, on blocks that it does not use.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pool = torch.zeros((num_blocks, *layout.shape), dtype=TORCH_DTYPES[layout.dtype], device=device)
        self.block_rows = self.pool.view(num_blocks * layout.num_layers * 2, -1)
        """One row a (block, layer, K or V): `[num_blocks * num_layers * 2, block_size * num_kv_heads * head_dim]`."""
        self.token_rows = self.pool.view(num_blocks * layout.num_layers * 2 * layout.block_size, -1)
        """One row a (block, layer, K or V, token): `[..., num_kv_heads * head_dim]`."""
        self._bytes = self.pool.view(torch.uint8).view(num_blocks, -1)
        self._host: NDArray[np.uint8] | None = self._bytes.numpy() if device.type == "cpu" else None
        self._staging = None if device.type == "cpu" else _staging(layout, device)

    def rows_of_blocks(self, block_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """[num_layers, 2, len(block_ids)]: rows of `block_rows`."""
        layers = np.arange(self.layout.num_layers * 2, dtype=np.int64).reshape(self.layout.num_layers, 2, 1)
        return layers + block_ids.astype(np.int64) * (self.layout.num_layers * 2)

    def rows_of_slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """[num_layers, 2, len(slots)]: rows of `token_rows`, for slots (block number * block_size + offset)."""
        size = self.layout.block_size
        return self.rows_of_blocks((slots // size).astype(np.int32)) * size + slots % size

    def scrub(self, slots: NDArray[np.int64]) -> None:
        """Zero what a failed step wrote: the blocks go back to the pool, and their numbers must be finite."""
        rows = torch.from_numpy(self.rows_of_slots(slots).ravel()).to(self.pool.device)
        self.token_rows.index_fill_(0, rows, 0)

    def export_blocks(self, block_ids: ListLike[int], out: ListLike[memoryview]) -> None:
        """Copy blocks into buffers of `layout.block_bytes` bytes. The copy runs without the interpreter's lock."""
        self._check(block_ids, out)
        if self._host is not None:
            for block_id, buffer in zip(block_ids, out, strict=True):
                np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._host[block_id])
            return
        for start in range(0, len(block_ids), self._staging_blocks):
            ids = block_ids[start : start + self._staging_blocks]
            self._staged(len(ids)).copy_(self._bytes[torch.tensor(ids, device=self.pool.device)])
            for staged, buffer in zip(self._staged(len(ids)).numpy(), out[start : start + len(ids)], strict=True):
                np.copyto(np.frombuffer(buffer, dtype=np.uint8), staged)

    def import_blocks(self, block_ids: ListLike[int], data: ListLike[memoryview]) -> None:
        """Copy buffers of `layout.block_bytes` bytes into blocks. The copy runs without the interpreter's lock."""
        self._check(block_ids, data)
        if self._host is not None:
            for block_id, buffer in zip(block_ids, data, strict=True):
                np.copyto(self._host[block_id], np.frombuffer(buffer, dtype=np.uint8))
            return
        for start in range(0, len(block_ids), self._staging_blocks):
            ids = block_ids[start : start + self._staging_blocks]
            for staged, buffer in zip(self._staged(len(ids)).numpy(), data[start : start + len(ids)], strict=True):
                np.copyto(staged, np.frombuffer(buffer, dtype=np.uint8))
            self._bytes[torch.tensor(ids, device=self.pool.device)] = self._staged(len(ids)).to(self.pool.device)

    def host_block(self, block_id: int) -> memoryview | None:
        """A block itself, if the pool is in the host's memory."""
        self._check_ids([block_id])
        return None if self._host is None else memoryview(self._host[block_id])

    def free(self) -> None:
        """Give the memory back; nothing else may be called afterwards."""
        self.pool = self.block_rows = self.token_rows = self._bytes = self.pool.new_empty(0)
        self._host = self._staging = None

    @property
    def _staging_blocks(self) -> int:
        assert self._staging is not None, "only a GPU is staged"
        return len(self._staging)

    def _staged(self, num_blocks: int) -> Tensor:
        assert self._staging is not None, "only a GPU is staged"
        return self._staging[:num_blocks]

    def _check(self, block_ids: ListLike[int], buffers: ListLike[memoryview]) -> None:
        if len(block_ids) != len(buffers) or any(buffer.nbytes != self.layout.block_bytes for buffer in buffers):
            raise EngineError(f"{len(block_ids)} blocks need as many buffers of {self.layout.block_bytes} bytes")
        self._check_ids(block_ids)

    def _check_ids(self, block_ids: ListLike[int]) -> None:
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise EngineError(f"a block outside the pool of {self.num_blocks}")


def _staging(layout: KvLayout, device: torch.device) -> Tensor:
    num_blocks = max(1, STAGING_BYTES // layout.block_bytes)
    return torch.empty((num_blocks, layout.block_bytes), dtype=torch.uint8, pin_memory=device.type == "cuda")
