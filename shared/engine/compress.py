"""The lower tiers' block formats: native, int8 and fp8 (e4m3) with one bfloat16 scale a row, converted at the device's border.

A row is one (layer, K or V, token, head), `head_dim` elements. A compressed block is `[rows, head_dim]` codes, then `[rows]` scales.
kvstore moves these bytes and knows nothing of them. Half of bfloat16's bytes: (64 + 2) / 128 at head_dim 64.
"""

from __future__ import annotations

import ctypes
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels import load_kernel
from shared.kv.layout import KvLayout, stored_layout
from shared.kv.slot_copy import BlockDevice

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

LARGEST = {"int8": 127.0, "fp8": 448.0}
_TORCH_CODE = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_TORCH_ELEMENT = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Codec(ABC):
    """One block between its device bytes and its stored bytes. Both buffers are contiguous uint8."""

    def __init__(self, layout: KvLayout, lower_format: Literal["int8", "fp8"]) -> None:
        self.lower_format = lower_format
        self.element = layout.dtype
        self.num_rows = layout.num_rows
        self.dim = layout.head_dim

    @abstractmethod
    def encode(self, block: Bytes, out: Bytes) -> None:
        """[layout.block_bytes] → [stored_layout.block_bytes]."""

    @abstractmethod
    def decode(self, stored: Bytes, out: Bytes) -> None:
        """[stored_layout.block_bytes] → [layout.block_bytes]."""


class TorchCodec(Codec):
    """The reference."""

    def encode(self, block: Bytes, out: Bytes) -> None:
        rows = torch.from_numpy(block).view(_TORCH_ELEMENT[self.element]).view(self.num_rows, self.dim).float()
        codes, scales = self._parts(out)
        # Rounded up to bfloat16, so that the largest element never leaves the range.
        bits = ((rows.abs().amax(dim=1) / LARGEST[self.lower_format]).view(torch.int32) + 0xFFFF) >> 16
        scales.view(torch.int16).copy_(bits.to(torch.int16))
        scale = (bits << 16).view(torch.float32)
        scaled = rows * torch.where(scale > 0, 1.0 / scale, 0.0)[:, None]
        whole = scaled.round() if self.lower_format == "int8" else scaled
        codes.view(_TORCH_CODE[self.lower_format]).copy_(whole.to(_TORCH_CODE[self.lower_format]).flatten())

    def decode(self, stored: Bytes, out: Bytes) -> None:
        codes, scales = self._parts(stored)
        rows = codes.view(_TORCH_CODE[self.lower_format]).view(self.num_rows, self.dim).float()
        rows *= scales.view(torch.bfloat16).float()[:, None]
        torch.from_numpy(out).view(_TORCH_ELEMENT[self.element]).copy_(rows.flatten())

    def _parts(self, stored: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
        num_codes = self.num_rows * self.dim
        whole = torch.from_numpy(stored)
        return whole[:num_codes], whole[num_codes:]


class KernelCodec(Codec):
    """The C kernel: one pass over the block."""

    def __init__(self, layout: KvLayout, lower_format: Literal["int8", "fp8"], library: ctypes.CDLL) -> None:
        super().__init__(layout, lower_format)
        self._encode: Any = library[f"encode_{lower_format}_{layout.dtype}"]
        self._decode: Any = library[f"decode_{lower_format}_{layout.dtype}"]
        for function in (self._encode, self._decode):
            function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
            function.restype = None

    def encode(self, block: Bytes, out: Bytes) -> None:
        codes = out.ctypes.data
        self._encode(block.ctypes.data, codes, codes + self.num_rows * self.dim, self.num_rows, self.dim)

    def decode(self, stored: Bytes, out: Bytes) -> None:
        codes = stored.ctypes.data
        self._decode(codes, codes + self.num_rows * self.dim, out.ctypes.data, self.num_rows, self.dim)


def make_codec(layout: KvLayout, lower_format: Literal["int8", "fp8"]) -> Codec:
    """The kernel where it can be compiled, else the reference (`load_kernel` says so in the log)."""
    library = load_kernel(Path(__file__).with_suffix(".c"))
    return TorchCodec(layout, lower_format) if library is None else KernelCodec(layout, lower_format, library)


class CompressedDevice:
    """An engine seen through a codec: what is exported is compressed, what is imported is expanded. `layout` is that of stored blocks."""

    def __init__(self, device: BlockDevice, layout: KvLayout, lower_format: Literal["int8", "fp8"]) -> None:
        self.layout = stored_layout(layout, lower_format)
        self._device = device
        self._codec = make_codec(layout, lower_format)
        self._block_bytes = layout.block_bytes

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        """As Engine.export_blocks; buffers of `stored_layout.block_bytes` bytes each."""
        scratch = np.empty(self._block_bytes, dtype=np.uint8)
        for block_id, buffer in zip(block_ids, out, strict=True):
            self._device.export_blocks([block_id], [scratch.data])
            self._codec.encode(scratch, np.frombuffer(buffer, dtype=np.uint8))

    def host_block(self, block_id: int) -> None:
        """Slots have another form than blocks."""

    def import_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        """As Engine.import_blocks; buffers of `stored_layout.block_bytes` bytes each."""
        scratch = np.empty(self._block_bytes, dtype=np.uint8)
        for block_id, buffer in zip(block_ids, data, strict=True):
            self._codec.decode(np.frombuffer(buffer, dtype=np.uint8), scratch)
            self._device.import_blocks([block_id], [scratch.data])
