"""One pass for two: a block's bytes are copied and summed, so that the checksum is of the copy and costs no second reading."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from shared.kernels import load_kernel

SummedCopy = Callable[[memoryview, memoryview], int]
"""(target, source): copies all bytes, returns the XXH3-64 of those that were written. Both have the same length."""

_LEAST_BYTES = 241
"""XXH3 sums fewer bytes in other ways."""


def copy_then_sum(target: memoryview, source: memoryview) -> int:
    """The reference."""
    # numpy lets other threads run meanwhile; a memoryview's assignment does not.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    return xxhash.xxh3_64_intdigest(target)


def load_copy_summed() -> SummedCopy:
    """The kernel where it can be compiled, else the reference (`load_kernel` says so in the log)."""
    library = load_kernel(Path(__file__).with_suffix(".c"))
    if library is None:
        return copy_then_sum
    function = library.copy_summed
    function.restype, function.argtypes = ctypes.c_uint64, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]

    def copy_summed(target: memoryview, source: memoryview) -> int:
        if len(target) != len(source) or len(target) < _LEAST_BYTES or source.readonly:
            return copy_then_sum(target, source)
        return int(function(_address(target), _address(source), len(target)))

    return copy_summed


def _address(memory: memoryview) -> int:
    """Of writable bytes. A seventh of the time that numpy takes to tell it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


copy_summed = load_copy_summed()
