"""How the bytes of one block are laid out."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from shared.errors import ConfigError

LowerFormat = Literal["native", "int8", "fp8"]
"""How the lower tiers keep blocks."""
CODE_DTYPE = {"int8": "int8", "fp8": "float8_e4m3"}
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3": 1}


class KvLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One block: `[num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]` of `dtype`, contiguous.

    A pool is `[num_blocks, *block]`, so one block is one copy, one checksum, one extent.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    order: str = "layer,kv,token,head,dim"
    """A backend that wants another order inside the block says so here: its blocks are then of another layout."""
    scale_dtype: str = ""
    """Of the scales behind the elements, one for each (layer, K or V, token, head); empty: no scales."""

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def num_rows(self) -> int:
        """Vectors of head_dim elements in a block."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads

    @property
    def block_bytes(self) -> int:
        return self.num_rows * (self.head_dim * ELEMENT_BYTES[self.dtype] + (ELEMENT_BYTES[self.scale_dtype] if self.scale_dtype else 0))

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def digest(self) -> str:
        """16 hex digits that name the layout."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]


def stored_layout(layout: KvLayout, lower_format: LowerFormat) -> KvLayout:
    """The layout of a block of `layout` as the lower tiers keep it."""
    if lower_format == "native":
        return layout
    if layout.dtype not in ("float32", "bfloat16"):
        raise ConfigError("SS_KV_FORMAT", lower_format, f"blocks of {layout.dtype} are not compressed", remedy="Use native")
    return msgspec.structs.replace(layout, dtype=CODE_DTYPE[lower_format], scale_dtype="bfloat16")
