"""How many bytes a block has, and when two layouts are the same."""

from __future__ import annotations

import msgspec
import pytest

from shared.errors import ConfigError
from shared.kv.layout import KvLayout, stored_layout

LAYOUT = KvLayout(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")


def test_sizes() -> None:
    assert LAYOUT.shape == (30, 2, 16, 3, 64)
    assert LAYOUT.num_rows == 30 * 2 * 16 * 3
    assert LAYOUT.block_bytes == 30 * 2 * 16 * 3 * 64 * 2
    assert LAYOUT.token_bytes * 16 == LAYOUT.block_bytes
    assert msgspec.structs.replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("change", [{"num_layers": 31}, {"block_size": 8}, {"dtype": "float16"}, {"order": "kv,layer,token,head,dim"}])
def test_every_field_makes_another_layout(change: dict[str, object]) -> None:
    assert msgspec.structs.replace(LAYOUT, **change).digest != LAYOUT.digest
    assert len(LAYOUT.digest) == 16


@pytest.mark.parametrize("lower_format", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compressed_blocks_have_a_byte_an_element_and_a_scale_a_row(lower_format: str, dtype: str) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    stored = stored_layout(layout, lower_format)  # type: ignore[arg-type]
    assert stored.block_bytes == layout.num_rows * (64 + 2)
    assert stored.shape == layout.shape
    assert stored.digest != layout.digest


def test_native_blocks_stay_as_they_are() -> None:
    assert stored_layout(LAYOUT, "native") is LAYOUT


def test_what_cannot_be_compressed_is_refused() -> None:
    with pytest.raises(ConfigError, match="SS_KV_FORMAT"):
        stored_layout(msgspec.structs.replace(LAYOUT, dtype="float16"), "int8")
