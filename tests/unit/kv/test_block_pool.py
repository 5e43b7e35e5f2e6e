"""The block pool by example; tests/property/test_block_pool.py drives it through anything."""

from __future__ import annotations

import pytest

from shared.errors import OutOfBlocks
from shared.kv.block_pool import BlockPool, Change

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks) as refused:
        pool.allocate(2)
    assert (refused.value.num_requested, refused.value.num_free) == (2, 1)
    assert (pool.num_used, pool.num_free) == (3, 1)
    pool.free(held)
    assert sorted(pool.allocate(4)) == [0, 1, 2, 3]


def test_a_shared_block_is_free_when_the_last_lets_go() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.cache(block, A, b"")
    assert pool.match_prefix([A]) == [block]
    pool.free([block])
    assert pool.num_used == 1
    pool.free([block])
    assert pool.num_used == 0
    with pytest.raises(AssertionError):
        pool.free([block])


def test_a_freed_block_is_found_until_it_is_handed_out_again() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.cache(blocks[0], A, b"")
    pool.cache(blocks[1], B, A)
    pool.free(blocks)
    assert pool.num_matching([A, B, C]) == 2
    pool.allocate(1)
    assert pool.match_prefix([A, B]) == [blocks[0]]
    assert pool.take_changes() == [Change(True, A, b""), Change(True, B, A), Change(False, B, A)]
    assert pool.take_changes() == []


def test_a_hit_makes_a_chain_the_last_to_go() -> None:
    pool = BlockPool(2)
    for block_hash in (A, B):
        [block] = pool.allocate(1)
        pool.cache(block, block_hash, b"")
        pool.free([block])
    pool.free(pool.match_prefix([A]))
    pool.allocate(1)
    assert pool.num_matching([A]) == 1
    assert pool.num_matching([B]) == 0


def test_of_two_blocks_with_one_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, A, b"")
    pool.cache(second, A, b"")
    assert pool.match_prefix([A]) == [first]
    pool.free([second])
    assert pool.allocate(1) == [second], "it holds nothing that could be found"
    assert pool.num_cached == 1


def test_a_run_ends_at_the_first_miss() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.cache(blocks[0], A, b"")
    pool.cache(blocks[1], C, B)
    assert pool.match_prefix([A, B, C]) == [blocks[0]]
    assert pool.match_prefix([]) == []


def test_entries_by_block_number() -> None:
    pool = BlockPool(3)
    for block, block_hash in zip(pool.allocate(3), (A, B, C), strict=True):
        pool.cache(block, block_hash, b"")
    assert [entry[0] for entry in pool.entries()] == [A, B, C]
    assert [entry[0] for entry in pool.entries(1, 2)] == [B]
    assert pool.entries(3, 9) == []


def test_clearing_keeps_what_is_held() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.cache(blocks[0], A, b"")
    pool.clear()
    assert (pool.num_cached, pool.num_used) == (0, 2)
    pool.check_integrity()
