from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.console.arena_size import MIB, check_arena_holds, holds, least_arena_bytes
from services.console.options import UpOptions
from services.kvstore.segments import Segments
from shared.engine.model.architecture import Architecture, Rope
from shared.errors import ConfigError, KvError
from shared.kv.arena import create_arena, segment_bytes_for


def model(num_layers: int = 32, num_kv_heads: int = 8, head_dim: int = 128) -> Architecture:
    return Architecture(
        family="llama",
        num_layers=num_layers,
        hidden_size=64,
        intermediate_size=64,
        num_heads=num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=8,
        max_position=64,
        norm_eps=1e-5,
        rope=Rope(),
        ties_embeddings=True,
    )


def test_a_model_whose_block_does_not_fit_is_refused_with_the_least_that_works() -> None:
    big = model(num_layers=126)  # 16 tokens of 126 layers, 8 heads of 128, bfloat16: 8,257,536 bytes
    with pytest.raises(ConfigError, match="8,257,536 bytes") as caught:
        check_arena_holds(UpOptions(kv_dram=4 * MIB), big, 16)
    assert caught.value.exit_code == 2
    assert "--kv-dram 8M" in caught.value.remedy
    check_arena_holds(UpOptions(kv_dram=8 * MIB), big, 16)


@pytest.mark.parametrize(
    ("fields", "fits"), [({}, True), ({"numerics": "exact"}, False), ({"dtype": "float32"}, False), ({"kv_format": "int8"}, True)]
)
def test_dtype_and_format_count(fields: dict[str, str], fits: bool) -> None:
    options = UpOptions(kv_dram=4 * MIB, **fields)  # type: ignore[arg-type]
    if fits:
        check_arena_holds(options, model(), 16)  # 2 MiB of bfloat16
    else:
        with pytest.raises(ConfigError):
            check_arena_holds(options, model(), 16)  # 4 MiB of float32, and the header


@given(block_bytes=st.integers(1, 64 * MIB))
def test_the_least_is_the_least(block_bytes: int) -> None:
    least = least_arena_bytes(block_bytes)
    assert holds(least, block_bytes)
    assert least == MIB or not holds(least - MIB, block_bytes)


@pytest.mark.parametrize("block_bytes", [1, 737_280, 1_000_000, 2 * MIB, 4 * MIB, 8_257_536])
def test_a_real_arena_agrees(block_bytes: int, tmp_path: Path) -> None:
    def segments(num_bytes: int) -> Segments:
        folder = tmp_path / str(num_bytes)
        folder.mkdir()
        arena = create_arena(folder, num_bytes, "aaaa0000")
        try:
            return Segments(arena.num_segments, arena.segment_bytes, arena.data_at, lambda *_: True)
        finally:
            arena.close()

    least = least_arena_bytes(block_bytes)
    assert segments(least).size_class("layout", block_bytes).slots_per_extent >= 1
    if least > MIB and least - MIB >= segment_bytes_for(least - MIB) * 2:
        with pytest.raises(KvError):
            segments(least - MIB).size_class("layout", block_bytes)
