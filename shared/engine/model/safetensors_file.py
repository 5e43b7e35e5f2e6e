"""The safetensors format without torch: reading a header, writing a file tensor by tensor.

Format: 8 bytes little-endian length, that many bytes of JSON {name: {dtype, shape, data_offsets}}, then the data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFault

DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100 * 2**20
ALIGNMENT = 64
"""The header is padded so that every float tensor lies aligned when the file is mapped."""


class StoredTensor(NamedTuple):
    """A tensor as the header describes it."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPE_BYTES[self.dtype]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Names, types and shapes in a safetensors file. Raises ModelFault if the file is not whole or holds a type we do not load."""
    remedy = "The file is damaged or was not downloaded whole: fetch it again"
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ModelFault(f"{path}: not a safetensors file", remedy=remedy)
            header: dict[str, Any] = msgspec.json.decode(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        stored = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
        num_bytes = path.stat().st_size
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelFault(f"{path}: not a whole safetensors file: {error}", remedy=remedy) from error
    if num_bytes != end:
        raise ModelFault(f"{path}: not a whole safetensors file: {num_bytes} bytes, its header says {end}", remedy=remedy)
    for name, tensor in stored.items():
        if tensor.dtype not in DTYPE_BYTES:
            raise ModelFault(f"{path}: tensor {name[:80]!r} is stored as {tensor.dtype[:16]}", remedy="Use weights in F32, F16 or BF16")
    return stored


class SafetensorsWriter:
    """Writes the tensors of `layout` in its order, in as many pieces as wanted, and hashes what it writes."""

    def __init__(self, path: Path, layout: Iterable[tuple[str, StoredTensor]]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, tensor in layout:
            header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + tensor.num_bytes]}
            at += tensor.num_bytes
        encoded = msgspec.json.encode(header)
        encoded += b" " * (-(len(encoded) + 8) % ALIGNMENT)
        self._sha256 = hashlib.sha256()
        self._left = at
        self._file = path.open("wb", buffering=0)
        self._write(len(encoded).to_bytes(8, "little") + encoded)

    def append(self, values: NDArray[Any]) -> None:
        """The next piece, in row order, in the dtype that the layout gave. Raises OSError (no room)."""
        self._left -= values.nbytes
        self._write(np.ascontiguousarray(values).view(np.uint8).data)

    def close(self) -> str:
        """Write everything through to the disk; returns the file's sha256 (hex)."""
        assert self._left == 0, "the pieces do not add up to the layout"
        os.fsync(self._file.fileno())
        self._file.close()
        return self._sha256.hexdigest()

    def _write(self, piece: bytes | memoryview) -> None:
        self._sha256.update(piece)
        view = memoryview(piece)
        while view:  # a raw file may take less than it is given
            view = view[self._file.write(view) or 0 :]

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
