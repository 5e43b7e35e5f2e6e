"""Block key → number of its set of holders. In C where it can be compiled, else a dict: one suite, one behaviour."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from services.router.kernel import KERNEL
from shared.kv.hashing import split
from shared.types import KEY_BYTES

FIRST_SCRATCH = 4096


class BlockTable(ABC):
    """Number 0 stands for absent. Keys come packed, 16 bytes each."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, packed: bytes) -> list[int]:
        """A number for each key."""

    @abstractmethod
    def set(self, packed: bytes, numbers: Sequence[int]) -> None:
        """0 deletes."""

    @abstractmethod
    def runs(self, packed: bytes, num_keys: int) -> list[tuple[int, int]]:
        """[(number, index of the last key with it, + 1)] of the leading keys that are present, while the number stays the same."""


class DictTable(BlockTable):
    """The reference."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def get(self, packed: bytes) -> list[int]:
        return [self._numbers.get(key, 0) for key in split(packed, KEY_BYTES)]

    def set(self, packed: bytes, numbers: Sequence[int]) -> None:
        for key, number in zip(split(packed, KEY_BYTES), numbers, strict=True):
            if number:
                self._numbers[key] = number
            else:
                self._numbers.pop(key, None)

    def runs(self, packed: bytes, num_keys: int) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for at in range(num_keys):
            number = self._numbers.get(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
            if number is None:
                break
            if runs and runs[-1][0] == number:
                runs.pop()
            runs.append((number, at + 1))
        return runs


class KernelTable(BlockTable):
    """Open addressing in C: 24 bytes a slot, one cache miss a key."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self._kernel = kernel
        self._table = kernel.table_new(secrets.randbits(63))
        if not self._table:
            raise MemoryError("no memory for the block table")
        self._free = weakref.finalize(self, kernel.table_free, self._table)
        self._reserve(FIRST_SCRATCH)

    def _reserve(self, num_keys: int) -> None:
        self._size = num_keys
        self._ids, self._lengths = np.zeros(num_keys, dtype=np.uint32), np.zeros(num_keys, dtype=np.int32)
        self._to_ids, self._to_lengths = self._ids.ctypes.data, self._lengths.ctypes.data

    def __len__(self) -> int:
        return int(self._kernel.table_len(self._table))

    def get(self, packed: bytes) -> list[int]:
        num_keys = len(packed) // KEY_BYTES
        if num_keys > self._size:
            self._reserve(num_keys)
        self._kernel.table_get(self._table, packed, num_keys, self._to_ids)
        numbers: list[int] = self._ids[:num_keys].tolist()
        return numbers

    def set(self, packed: bytes, numbers: Sequence[int]) -> None:
        num_keys = len(packed) // KEY_BYTES
        if num_keys > self._size:
            self._reserve(num_keys)
        self._ids[:num_keys] = numbers
        if self._kernel.table_set(self._table, packed, num_keys, self._to_ids):
            raise MemoryError("no memory for the block table")

    def runs(self, packed: bytes, num_keys: int) -> list[tuple[int, int]]:
        if num_keys > self._size:
            self._reserve(num_keys)
        num_runs = self._kernel.table_runs(self._table, packed, min(num_keys, len(packed) // KEY_BYTES), self._to_ids, self._to_lengths)
        return list(zip(self._ids[:num_runs].tolist(), self._lengths[:num_runs].tolist(), strict=True))


def make_table() -> BlockTable:
    return DictTable() if KERNEL is None else KernelTable(KERNEL)
