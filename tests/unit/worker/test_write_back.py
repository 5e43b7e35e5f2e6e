"""Blocks on their way to the store are held, few of them, and always let go of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.kvclient import StoreResult
from shared.telemetry import NullTelemetry
from shared.worker.write_back import POOL_SHARE, WriteBack


class Store:
    """Stores when it may."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.began = asyncio.Event()
        self.stored: list[list[BlockToStore]] = []

    async def store(self, blocks: list[BlockToStore], **more: Any) -> StoreResult:
        self.began.set()
        await self.may.wait()
        self.stored.append(blocks)
        return StoreResult(len(blocks), 0, 0, "")


class Rig:
    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.store = Store()
        self.telemetry = NullTelemetry()
        self.num_freed = 0
        self.write_back = WriteBack(self.pool, self.store, self.telemetry, self._freed)  # type: ignore[arg-type]

    def _freed(self) -> None:
        self.num_freed += 1

    def blocks(self, *numbers: int) -> list[BlockToStore]:
        """Full blocks that are cached and held by nobody."""
        made = []
        for number in numbers:
            [block] = self.pool.allocate(1)
            block_hash = bytes([number]) * 32
            self.pool.cache(block, block_hash, b"")
            self.pool.free([block])
            made.append(BlockToStore(block_hash, b"", b"", block, ""))
        return made


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_blocks_that_come_meanwhile_travel_together(rig: Rig) -> None:
    following = asyncio.create_task(rig.write_back.follow())
    rig.write_back.add(rig.blocks(1))
    await rig.store.began.wait()
    rig.write_back.add(rig.blocks(2))
    rig.write_back.add(rig.blocks(3))
    assert rig.pool.num_used == 3, "nobody else gets them before they are copied"
    rig.store.may.set()
    while len(rig.store.stored) < 2:
        await asyncio.sleep(0)
    assert [[block.hash[0] for block in blocks] for blocks in rig.store.stored] == [[1], [2, 3]]
    while rig.num_freed < 2:
        await asyncio.sleep(0)
    assert (rig.pool.num_used, rig.num_freed) == (0, 2)
    following.cancel()


async def test_a_slow_store_keeps_a_part_of_the_pool_at_most(rig: Rig) -> None:
    rig.write_back.add(rig.blocks(*range(1, 11)))
    assert rig.pool.num_used == 16 // POOL_SHARE
    assert rig.telemetry.total("write_back_dropped") == 10 - 16 // POOL_SHARE


async def test_a_block_that_was_handed_out_again_is_not_written(rig: Rig) -> None:
    blocks = rig.blocks(1)
    rig.pool.allocate(16)
    rig.write_back.add(blocks)
    assert rig.telemetry.total("write_back_dropped") == 1


async def test_the_block_that_has_the_content_now_is_written(rig: Rig) -> None:
    [block] = rig.blocks(1)
    rig.write_back.add([block._replace(block_id=9)])
    rig.store.may.set()
    following = asyncio.create_task(rig.write_back.follow())
    while not rig.store.stored:
        await asyncio.sleep(0)
    assert rig.store.stored[0][0].block_id == block.block_id
    following.cancel()


async def test_what_waits_and_what_is_under_way_is_let_go_of_at_the_end(rig: Rig) -> None:
    following = asyncio.create_task(rig.write_back.follow())
    rig.write_back.add(rig.blocks(1))
    await rig.store.began.wait()
    rig.write_back.add(rig.blocks(2))
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    rig.write_back.abandon()
    assert rig.pool.num_used == 0
    rig.pool.check_integrity()
