"""The pool: which row is which token, and blocks out and in byte for byte."""

import numpy as np
import pytest
import torch

from shared.engine import paged_cache
from shared.engine.paged_cache import PagedKvCache
from shared.errors import EngineError
from shared.kv.layout import KvLayout


def create_cache(dtype: str = "float32", num_blocks: int = 5) -> PagedKvCache:
    layout = KvLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=6, dtype=dtype)
    return PagedKvCache(layout, num_blocks, torch.device("cpu"))


def test_rows_of_slots_are_the_tokens_of_the_pool() -> None:
    cache = create_cache()
    cache.pool.copy_(torch.arange(cache.pool.numel()).view(cache.pool.shape))
    slots = np.array([13, 0, 19])
    rows = cache.rows_of_slots(slots)
    assert rows.shape == (3, 2, 3)
    for layer in range(3):
        for kind in range(2):
            expected = torch.stack([cache.pool[slot // 4, layer, kind, slot % 4].flatten() for slot in slots])
            assert torch.equal(cache.token_rows[torch.from_numpy(rows[layer, kind])], expected)


def test_rows_of_blocks_are_the_blocks_of_the_pool() -> None:
    cache = create_cache()
    cache.pool.copy_(torch.arange(cache.pool.numel()).view(cache.pool.shape))
    rows = cache.rows_of_blocks(np.array([4, 1], dtype=np.int32))
    for layer in range(3):
        for kind in range(2):
            expected = cache.pool[[4, 1], layer, kind].flatten(1)
            assert torch.equal(cache.block_rows[torch.from_numpy(rows[layer, kind])], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_travel_byte_for_byte(dtype: str) -> None:
    source, target = create_cache(dtype), create_cache(dtype)
    source.pool.normal_()
    buffers = [memoryview(bytearray(source.layout.block_bytes)) for _ in range(2)]
    source.export_blocks([3, 0], buffers)
    target.import_blocks([1, 4], buffers)
    assert torch.equal(target.pool[1], source.pool[3])
    assert torch.equal(target.pool[4], source.pool[0])
    assert not target.pool[[0, 2, 3]].any()


def test_blocks_travel_through_the_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU's blocks, here with a pool in the same memory: more blocks than the buffer holds."""
    monkeypatch.setattr(paged_cache, "STAGING_BYTES", 2 * 1152 + 1)
    source, target = create_cache(num_blocks=7), create_cache(num_blocks=7)
    for cache in (source, target):
        cache._host, cache._staging = None, paged_cache._staging(cache.layout, torch.device("cpu"))
    source.pool.normal_()
    buffers = [memoryview(bytearray(1152)) for _ in range(5)]
    source.export_blocks([6, 1, 2, 0, 4], buffers)
    target.import_blocks([0, 1, 2, 3, 4], buffers)
    assert torch.equal(target.pool[:5], source.pool[[6, 1, 2, 0, 4]])
    assert not target.pool[5:].any()


def test_a_read_only_buffer_can_be_imported() -> None:
    cache = create_cache()
    cache.import_blocks([0], [memoryview(bytes(cache.layout.block_bytes))])


@pytest.mark.parametrize(("block_ids", "num_bytes"), [([0, 1], [576]), ([0], [575]), ([5], [576]), ([-1], [576])])
def test_wrong_blocks_or_buffers_change_nothing(block_ids: list[int], num_bytes: list[int]) -> None:
    cache = create_cache()
    assert cache.layout.block_bytes == 1152
    buffers = [memoryview(bytearray(b"\1" * (size * 2))) for size in num_bytes]
    with pytest.raises(EngineError):
        cache.import_blocks(block_ids, buffers)
    with pytest.raises(EngineError):
        cache.export_blocks(block_ids, buffers)
    assert not cache.pool.any()


def test_scrub_zeroes_the_slots_in_every_layer() -> None:
    cache = create_cache()
    cache.pool.fill_(float("nan"))
    cache.scrub(np.array([5, 6]))
    assert not cache.pool[1, :, :, 1:3].any()
    assert cache.pool.isnan().sum() == cache.pool.numel() - 2 * 3 * 2 * 12


def test_free_gives_the_memory_back() -> None:
    cache = create_cache()
    cache.free()
    assert cache.pool.numel() == 0
