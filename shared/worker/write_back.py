"""Full blocks on their way from the device pool to the host's store, off the step's path: one reserve and one commit for all that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.kvclient import KvClient
from shared.telemetry import Telemetry

MAX_WAITING = 2048
GATHER_S = 0.02
"""Blocks are gathered for so long: nobody waits for them, and a step's few would cost the store as many messages as all of these."""
POOL_SHARE = 4
"""At most so many blocks wait, and at most this part of the pool: a slow store must not keep it from sequences. What comes on top is not
written back: counted, and computed again by whoever needs it."""


class WriteBack:
    """Holds each waiting block in the pool until it is copied; `freed` is called when blocks were let go of."""

    def __init__(self, pool: BlockPool, kv: KvClient, telemetry: Telemetry, freed: Callable[[], None]) -> None:
        self._pool = pool
        self._kv = kv
        self._telemetry = telemetry
        self._freed = freed
        self._max_waiting = min(MAX_WAITING, pool.num_blocks // POOL_SHARE)
        self._waiting: list[BlockToStore] = []
        self._some = asyncio.Event()

    def add(self, blocks: list[BlockToStore]) -> None:
        """Write these back soon. They are cached in the pool now."""
        for block in blocks:
            held = self._pool.match_prefix([block.hash]) if len(self._waiting) < self._max_waiting else []
            if held:
                self._waiting.append(block._replace(block_id=held[0]))
            else:
                self._telemetry.count("write_back_dropped")
        if self._waiting:
            self._some.set()

    async def follow(self) -> None:
        """For ever."""
        while True:
            await self._some.wait()
            self._some.clear()
            if len(self._waiting) < self._max_waiting // 2:
                await asyncio.sleep(GATHER_S)
            blocks, self._waiting = self._waiting, []
            try:
                await self._kv.store(blocks)
            finally:
                self._let_go(blocks)

    def abandon(self) -> None:
        """Forget what waits."""
        blocks, self._waiting = self._waiting, []
        self._let_go(blocks)

    def _let_go(self, blocks: list[BlockToStore]) -> None:
        for block in blocks:
            self._pool.free([block.block_id])
        self._freed()
