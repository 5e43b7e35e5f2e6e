"""kernel.c, compiled and loaded; None where there is no compiler: then every caller uses its reference, and the router counts that."""

from __future__ import annotations

import ctypes
from pathlib import Path

from shared.kernels import load_kernel

POINTER, INT, UNSIGNED, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "table_new": (POINTER, [UNSIGNED]),
    "table_free": (None, [POINTER]),
    "table_len": (UNSIGNED, [POINTER]),
    "table_get": (None, [POINTER, ctypes.c_char_p, INT, POINTER]),
    "table_set": (ctypes.c_int, [POINTER, ctypes.c_char_p, INT, POINTER]),
    "table_runs": (INT, [POINTER, ctypes.c_char_p, INT, POINTER, POINTER]),
    "choose": (INT, [POINTER, POINTER, POINTER, POINTER, DOUBLE, DOUBLE, DOUBLE, DOUBLE, DOUBLE, UNSIGNED, POINTER]),
    "choose_prefill": (INT, [POINTER, POINTER, DOUBLE, DOUBLE, DOUBLE, UNSIGNED, POINTER]),
    "near": (INT, [POINTER, INT, UNSIGNED, INT, INT, POINTER]),
    "simhash": (None, [ctypes.c_char_p, INT, POINTER, INT, POINTER, POINTER, POINTER]),
}


class CPool(ctypes.Structure):
    """`Pool` of kernel.c."""

    _fields_ = [("n", INT)] + [
        (name, POINTER)
        for name in ("features", "num_blocks", "max_requests", "queued_tokens", "tokens_per_s", "last_sent_s", "device", "dram", "ssd")
    ]


def _load() -> ctypes.CDLL | None:
    kernel = load_kernel(Path(__file__).with_suffix(".c"))
    if kernel is not None:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(kernel, name)
            function.restype, function.argtypes = result, arguments
    return kernel


KERNEL = _load()
