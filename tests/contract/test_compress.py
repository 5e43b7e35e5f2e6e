"""Both codecs, one suite: bounds, edge rows, and the kernel's bytes equal to the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

from shared.engine import compress
from shared.engine.compress import Codec, CompressedDevice, KernelCodec, TorchCodec
from shared.errors import ConfigError
from shared.kernels import load_kernel
from shared.kv.layout import KvLayout, stored_layout

LIBRARY = load_kernel(Path(compress.__file__).with_suffix(".c"))
FORMATS: list[Literal["int8", "fp8"]] = ["int8", "fp8"]
RELATIVE_ERROR = {"int8": 0.5 / 127 * 1.01, "fp8": 1 / 16 * 1.01}
"""Of the row's largest element (int8: half a step) and of the element itself (e4m3: half of 2^-3)."""


def layout(dtype: str) -> KvLayout:
    return KvLayout(num_layers=3, block_size=16, num_kv_heads=2, head_dim=64, dtype=dtype)


def codec(kind: str, dtype: str, lower_format: Literal["int8", "fp8"]) -> Codec:
    if kind == "torch":
        return TorchCodec(layout(dtype), lower_format)
    assert LIBRARY is not None, "the C kernel did not compile here"
    return KernelCodec(layout(dtype), lower_format, LIBRARY)


def random_block(dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(layout(dtype).num_rows, 64, generator=generator) * torch.logspace(-6, 3, layout(dtype).num_rows)[:, None]
    rows[0] = 0.0
    rows[1, 3] = 40.0
    return rows.to(torch.float32 if dtype == "float32" else torch.bfloat16)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).flatten().numpy()


@pytest.mark.parametrize("kind", ["torch", "kernel"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lower_format", FORMATS)
def test_round_trip_stays_within_the_format(kind: str, dtype: str, lower_format: Literal["int8", "fp8"]) -> None:
    block = random_block(dtype)
    one = codec(kind, dtype, lower_format)
    stored = np.empty(stored_layout(layout(dtype), lower_format).block_bytes, dtype=np.uint8)
    back = torch.empty_like(block)
    one.encode(as_bytes(block), stored)
    one.decode(stored, as_bytes(back))
    error = (back.float() - block.float()).abs()
    largest = block.float().abs().amax(dim=1, keepdim=True)
    unit = largest if lower_format == "int8" else torch.maximum(block.float().abs(), largest / 448 / 8)
    rounding = block.float().abs() / 256 if dtype == "bfloat16" else 0.0
    assert (error <= unit * RELATIVE_ERROR[lower_format] + rounding + largest / 2**20).all()
    assert (back[0] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lower_format", FORMATS)
@pytest.mark.parametrize("seed", range(3))
def test_kernel_gives_the_bytes_of_the_reference(dtype: str, lower_format: Literal["int8", "fp8"], seed: int) -> None:
    block = as_bytes(random_block(dtype, seed))
    reference, kernel = (codec(kind, dtype, lower_format) for kind in ("torch", "kernel"))
    stored = [np.zeros(stored_layout(layout(dtype), lower_format).block_bytes, dtype=np.uint8) for _ in range(2)]
    reference.encode(block, stored[0])
    kernel.encode(block, stored[1])
    np.testing.assert_array_equal(stored[0], stored[1])
    back = [np.empty_like(block) for _ in range(2)]
    reference.decode(stored[0], back[0])
    kernel.decode(stored[0], back[1])
    np.testing.assert_array_equal(back[0], back[1])


def test_every_e4m3_code_decodes_as_torch_says() -> None:
    wide = KvLayout(num_layers=1, block_size=1, num_kv_heads=1, head_dim=128, dtype="float32")
    assert LIBRARY is not None
    for codes in (np.arange(0, 127, dtype=np.uint8), np.arange(128, 255, dtype=np.uint8)):
        stored = np.zeros(stored_layout(wide, "fp8").block_bytes, dtype=np.uint8)
        stored[: len(codes)] = codes
        stored[256:].view(np.uint16)[:] = 0x3F80
        out = np.empty(wide.block_bytes, dtype=np.uint8)
        KernelCodec(wide, "fp8", LIBRARY).decode(stored, out)
        expected = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        np.testing.assert_array_equal(out.view(np.float32)[: len(codes)], expected)


class Pool:
    """A device of plain buffers."""

    def __init__(self, blocks: Sequence[np.ndarray]) -> None:
        self.blocks = list(blocks)

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        for block_id, buffer in zip(block_ids, out, strict=True):
            buffer[:] = memoryview(self.blocks[block_id])

    def import_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        for block_id, buffer in zip(block_ids, data, strict=True):
            self.blocks[block_id][:] = np.frombuffer(buffer, dtype=np.uint8)


def test_a_device_behind_a_codec_moves_blocks_in_stored_form() -> None:
    blocks = [as_bytes(random_block("bfloat16", seed)) for seed in range(2)]
    pool = Pool([block.copy() for block in blocks])
    device = CompressedDevice(pool, layout("bfloat16"), "int8")
    stored = [bytearray(stored_layout(layout("bfloat16"), "int8").block_bytes) for _ in range(2)]
    device.export_blocks([1, 0], [memoryview(buffer) for buffer in stored])
    pool.blocks = [np.zeros_like(block) for block in blocks]
    device.import_blocks([1, 0], [memoryview(buffer) for buffer in stored])
    for before, after in zip(blocks, pool.blocks, strict=True):
        rows = [torch.from_numpy(block).view(torch.bfloat16).float() for block in (before, after)]
        torch.testing.assert_close(rows[1], rows[0], rtol=0.01, atol=float(rows[0].abs().max()) / 127)
    assert len(stored[0]) / layout("bfloat16").block_bytes == pytest.approx(66 / 128)


def test_compressing_codes_again_is_refused() -> None:
    with pytest.raises(ConfigError, match="SS_KV_FORMAT"):
        stored_layout(stored_layout(layout("float32"), "int8"), "fp8")
