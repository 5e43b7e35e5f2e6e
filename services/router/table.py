"""Block key → number of its set of holders. In C where it can be compiled, else a dict: one suite, one behaviour."""

from __future__ import annotations

import ctypes
import secrets
import weakref
from abc import ABC, abstractmethod
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from services.router.kernel import TABLE_KERNEL
from shared.kv.hashing import split
from shared.types import KEY_BYTES

FIRST_SCRATCH = 4096

NumberRuns = list[tuple[int, int]]
"""[(number, index of the last key with it, + 1)]"""


class BlockTable(ABC):
    """Number 0 stands for absent. Keys come packed, 16 bytes each. A number can be marked gone: its keys are swept out in time."""

    @abstractmethod
    def __len__(self) -> int:
        """Keys of numbers that are not gone."""

    @property
    @abstractmethod
    def num_gone(self) -> int:
        """Keys of numbers that are."""

    @abstractmethod
    def runs(self, packed: bytes, num_keys: int) -> NumberRuns:
        """Of the leading keys that are present."""

    @abstractmethod
    def all_runs(self, packed: bytes) -> NumberRuns:
        """Of all keys, those that are absent (0) too."""

    @abstractmethod
    def assign(self, packed: bytes, runs: NumberRuns) -> None:
        """Give every key its number; 0 deletes."""

    @abstractmethod
    def mark(self, number: int, is_gone: bool) -> None: ...

    @abstractmethod
    def counts(self, num_numbers: int) -> list[int]:
        """How many keys each of the first numbers has."""

    @abstractmethod
    def sweep(self, num_slots: int) -> None:
        """Look at some more keys, and delete those of numbers that are gone."""

    @abstractmethod
    def content(self) -> tuple[bytes, NDArray[np.uint32]]:
        """All keys in no order, packed, and their numbers."""


class DictTable(BlockTable):
    """The reference."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers) - self.num_gone

    @property
    def num_gone(self) -> int:
        return sum(number in self._gone for number in self._numbers.values())

    def runs(self, packed: bytes, num_keys: int) -> NumberRuns:
        runs = self.all_runs(packed[: num_keys * KEY_BYTES])
        absent = next((at for at, (number, _) in enumerate(runs) if not number), len(runs))
        return runs[:absent]

    def all_runs(self, packed: bytes) -> NumberRuns:
        runs: NumberRuns = []
        for at, key in enumerate(split(packed, KEY_BYTES)):
            number = self._numbers.get(key, 0)
            if runs and runs[-1][0] == number:
                runs.pop()
            runs.append((number, at + 1))
        return runs

    def assign(self, packed: bytes, runs: NumberRuns) -> None:
        begin = 0
        for number, end in runs:
            for key in split(packed[begin * KEY_BYTES : end * KEY_BYTES], KEY_BYTES):
                if number:
                    self._numbers[key] = number
                else:
                    self._numbers.pop(key, None)
            begin = end

    def mark(self, number: int, is_gone: bool) -> None:
        (self._gone.add if is_gone else self._gone.discard)(number)

    def counts(self, num_numbers: int) -> list[int]:
        counts = Counter(self._numbers.values())
        return [counts[number] for number in range(num_numbers)]

    def sweep(self, num_slots: int) -> None:
        some = [key for key, number in self._numbers.items() if number in self._gone][:num_slots]
        for key in some:
            del self._numbers[key]

    def content(self) -> tuple[bytes, NDArray[np.uint32]]:
        return b"".join(self._numbers), np.array(list(self._numbers.values()), dtype=np.uint32)


class KernelTable(BlockTable):
    """Open addressing in C: 24 bytes a slot, fetched ahead."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self._kernel = kernel
        self._table = kernel.table_new(secrets.randbits(63))
        if not self._table:
            raise MemoryError("no memory for the block table")
        self._free = weakref.finalize(self, kernel.table_free, self._table)
        self._swept_to = 0
        self._reserve(FIRST_SCRATCH)

    def _reserve(self, num_keys: int) -> None:
        self._size = num_keys
        self._numbers, self._ends = (ctypes.c_uint32 * num_keys)(), (ctypes.c_int32 * num_keys)()
        self._to_numbers, self._to_ends = ctypes.addressof(self._numbers), ctypes.addressof(self._ends)

    def __len__(self) -> int:
        return int(self._kernel.table_len(self._table)) - self.num_gone

    @property
    def num_gone(self) -> int:
        return int(self._kernel.table_num_gone(self._table))

    def runs(self, packed: bytes, num_keys: int) -> NumberRuns:
        return self._runs(packed, min(num_keys, len(packed) // KEY_BYTES), 1)

    def all_runs(self, packed: bytes) -> NumberRuns:
        return self._runs(packed, len(packed) // KEY_BYTES, 0)

    def _runs(self, packed: bytes, num_keys: int, only_leading: int) -> NumberRuns:
        if num_keys > self._size:
            self._reserve(num_keys)
        count = self._kernel.table_runs(self._table, packed, num_keys, only_leading, self._to_numbers, self._to_ends)
        return list(zip(self._numbers[:count], self._ends[:count], strict=True))

    def assign(self, packed: bytes, runs: NumberRuns) -> None:
        count = len(runs)
        if count > self._size:
            self._reserve(count)
        if runs:
            self._numbers[:count], self._ends[:count] = map(list, zip(*runs, strict=True))
        if self._kernel.table_assign(self._table, packed, count, self._to_numbers, self._to_ends):
            raise MemoryError("no memory for the block table")

    def mark(self, number: int, is_gone: bool) -> None:
        if self._kernel.table_mark(self._table, number, is_gone):
            raise MemoryError("no memory for the block table")

    def counts(self, num_numbers: int) -> list[int]:
        found = np.zeros(num_numbers, dtype=np.uint32)
        self._kernel.table_counts(self._table, num_numbers, found.ctypes.data)
        counts: list[int] = found.tolist()
        return counts

    def sweep(self, num_slots: int) -> None:
        self._swept_to = self._kernel.table_sweep(self._table, self._swept_to, num_slots)

    def content(self) -> tuple[bytes, NDArray[np.uint32]]:
        count = self._kernel.table_len(self._table)
        packed, numbers = np.zeros(count * KEY_BYTES, dtype=np.uint8), np.zeros(count, dtype=np.uint32)
        self._kernel.table_content(self._table, packed.ctypes.data, numbers.ctypes.data)
        return packed.tobytes(), numbers


def make_table() -> BlockTable:
    return DictTable() if TABLE_KERNEL is None else KernelTable(TABLE_KERNEL)
