"""Whether an arena can hold a block of the model: a store that starts, holds nothing and says so late is worse than a refusal."""

from __future__ import annotations

from itertools import count

from services.console.options import UpOptions
from shared.engine.model.architecture import Architecture
from shared.errors import ConfigError
from shared.kv.arena import segment_bytes_for
from shared.kv.layout import KvLayout, stored_layout
from shared.kv.slot import slot_bytes

MIB = 2**20
_HEAD_BYTES = 64 * 2**10
"""At most what an arena's header and segment table take."""


def check_arena_holds(options: UpOptions, architecture: Architecture, block_size: int) -> None:
    """ConfigError with the least `--kv-dram` that works, unless one block of the model fits into it."""
    layout = KvLayout(
        num_layers=architecture.num_layers,
        block_size=block_size,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=_dtype(options),
    )
    block_bytes = stored_layout(layout, options.kv_format).block_bytes
    if not holds(options.kv_dram, block_bytes):
        raise ConfigError(
            "--kv-dram",
            f"{options.kv_dram} bytes",
            f"one block of {block_size} tokens of this model takes {block_bytes:,} bytes",
            remedy=f"The least that holds one: --kv-dram {least_arena_bytes(block_bytes) // MIB}M    (the default is 1G)",
        )


def holds(arena_bytes: int, block_bytes: int) -> bool:
    """Whether an arena of that size has room for a block."""
    segment_bytes = segment_bytes_for(arena_bytes)
    return (arena_bytes - _HEAD_BYTES) // segment_bytes * segment_bytes >= slot_bytes(block_bytes)


def least_arena_bytes(block_bytes: int) -> int:
    """In whole MiB."""
    return next(num * MIB for num in count(1) if holds(num * MIB, block_bytes))


def _dtype(options: UpOptions) -> str:
    """Of the blocks. `auto` is settled where the engine runs: the smaller one, so that nothing is refused that would have worked."""
    if options.numerics == "exact":
        return "float32"
    return "bfloat16" if options.dtype == "auto" else options.dtype
