"""Reading a GGUF file: metadata and where each tensor lies. Every length is checked against the file before it is believed.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.errors import ModelFault

MAGIC = b"GGUF"
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
DAMAGED_REMEDY = "The file is damaged or was not downloaded whole: fetch it again"


class TensorType(NamedTuple):
    """A storage type: `block_bytes` bytes hold `block_elements` numbers."""

    name: str
    block_elements: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
}
"""Type number → layout, for the types that we dequantise."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor's place in the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first: [out, in], as PyTorch counts (the file stores it the other way round)."""
    type_id: int
    offset: int
    """From the start of the file."""
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_id].name


class GgufFile:
    """A GGUF file, mapped until the last array of it is gone. `metadata` and `tensors` are read at once, tensor bytes when asked for.

    Raises ModelFault.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelFault(f"{path}: cannot be read: {error}", remedy=DAMAGED_REMEDY) from error
        self._at = 0
        try:
            self._read_header()
        except UnicodeDecodeError as error:
            raise self._damaged("a name is not UTF-8") from error

    def raw(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """The tensor's bytes as stored: [rows, bytes of a row], a view of the map."""
        rows = math.prod(tensor.shape[:-1])
        flat = np.frombuffer(self._bytes, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)
        return flat.reshape(rows, -1)

    def _damaged(self, what: str) -> ModelFault:
        return ModelFault(f"{self.path}: not a whole GGUF file: {what}", remedy=DAMAGED_REMEDY)

    def _read_header(self) -> None:
        if self._take(4) != MAGIC:
            raise ModelFault(f"{self.path}: not a GGUF file", remedy="Give a .gguf file or a folder with config.json and safetensors")
        version = self._number("<I")
        if version not in (2, 3):
            raise ModelFault(f"{self.path}: GGUF version {version} is not supported", remedy="Convert it to GGUF version 3, little-endian")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise self._damaged("the alignment is out of range")
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: self._locate(name, shape, type_id, start + offset) for name, shape, type_id, offset in entries}

    def _take(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._bytes):
            raise self._damaged(f"it ends at byte {len(self._bytes)}, in the middle of its header")
        taken = self._bytes[self._at : end]
        self._at = end
        return taken

    def _number(self, code: str) -> Any:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode("utf-8")

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(self._number("<I"), self._number("<Q"))
        if type_id in _SCALARS:
            return self._number(_SCALARS[type_id])
        raise self._damaged(f"a field of unknown type {type_id}")

    def _array(self, type_id: int, length: int) -> list[Any]:
        if length > len(self._bytes):
            raise self._damaged("an array longer than the file")
        if type_id in _SCALARS:
            code = np.dtype(_SCALARS[type_id])
            values: list[Any] = np.frombuffer(self._take(length * code.itemsize), dtype=code).tolist()
            return values
        if type_id == _STRING:
            return [self._string() for _ in range(length)]
        raise self._damaged(f"an array of unknown type {type_id}")

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("<I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._damaged(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._number("<I"), self._number("<Q")

    def _locate(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        stored = TENSOR_TYPES.get(type_id)
        if stored is None:
            raise ModelFault(
                f"{self.path}: tensor {name!r} has the storage type {type_id}, which is not supported",
                remedy=f"Use a file quantised as one of {', '.join(kind.name for kind in TENSOR_TYPES.values())}",
            )
        num_elements = math.prod(shape)
        if min(shape) < 1 or shape[-1] % stored.block_elements:
            raise self._damaged(f"tensor {name!r} has the shape {shape}")
        num_bytes = num_elements // stored.block_elements * stored.block_bytes
        if offset + num_bytes > len(self._bytes):
            raise self._damaged(f"it ends at byte {len(self._bytes)}, before the end of tensor {name!r}")
        return GgufTensor(name, shape, type_id, offset, num_bytes)
