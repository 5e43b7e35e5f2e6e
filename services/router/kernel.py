"""kernel.c and table.c, compiled and loaded.

None where there is no compiler: then every caller uses its reference, and the router counts that.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from shared.kernels import load_kernel

POINTER, INT, UNSIGNED, DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
Signatures = dict[str, tuple[object, list[object]]]
TABLE: Signatures = {
    "table_new": (POINTER, [UNSIGNED]),
    "table_free": (None, [POINTER]),
    "table_len": (UNSIGNED, [POINTER]),
    "table_num_gone": (UNSIGNED, [POINTER]),
    "table_runs": (INT, [POINTER, ctypes.c_char_p, INT, INT, POINTER, POINTER]),
    "table_assign": (ctypes.c_int, [POINTER, ctypes.c_char_p, INT, POINTER, POINTER]),
    "table_mark": (ctypes.c_int, [POINTER, ctypes.c_uint32, ctypes.c_uint32]),
    "table_counts": (None, [POINTER, ctypes.c_uint32, POINTER]),
    "table_sweep": (UNSIGNED, [POINTER, UNSIGNED, INT]),
    "table_content": (None, [POINTER, POINTER, POINTER]),
}
DECISION: Signatures = {
    "choose": (INT, [POINTER, POINTER, POINTER, POINTER, DOUBLE, DOUBLE, UNSIGNED]),
    "choose_prefill": (INT, [POINTER, POINTER, POINTER, DOUBLE, UNSIGNED]),
    "near": (INT, [POINTER, INT, UNSIGNED, INT, INT, POINTER]),
    "simhash": (None, [ctypes.c_char_p, INT, POINTER, INT, POINTER, POINTER, POINTER]),
}


class CPool(ctypes.Structure):
    """`Pool` of kernel.c."""

    _fields_ = [
        ("n", INT),
        *((name, DOUBLE) for name in ("block_size", "window", "slack", "tie")),
        *((name, POINTER) for name in ("features", "num_blocks", "max_requests", "queued_tokens", "tokens_per_s", "last_sent_s")),
        *((name, POINTER) for name in ("device", "dram", "ssd", "scratch", "told")),
    ]


def _load(source: str, signatures: Signatures) -> ctypes.CDLL | None:
    """Calls keep the interpreter's lock: they take some microseconds, and getting it back from another thread would take far longer."""
    library = load_kernel(Path(__file__).with_name(source))
    if library is None:
        return None
    kernel = ctypes.PyDLL(library._name)
    for name, (result, arguments) in signatures.items():
        function = getattr(kernel, name)
        function.restype, function.argtypes = result, arguments
    return kernel


KERNEL = _load("kernel.c", DECISION)
TABLE_KERNEL = _load("table.c", TABLE)
