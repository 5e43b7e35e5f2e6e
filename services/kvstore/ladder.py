"""Blocks going down (a copy of each committed block) and up (blocks wanted in the arena) between the tiers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from services.kvstore.incoming import STORE_WRITER
from services.kvstore.store import BlockStore
from services.kvstore.tiers.base import Changes, LowerTier
from services.kvstore.tiers.index import Block
from shared.errors import KvError
from shared.types import Tier

_MAX_WAITING = 4096
_MAX_CLIMBS = 24
"""Blocks climbing at once for somebody who waits; a disk has no use for a longer queue."""


class Ladder(Changes):
    """Stands between the tiers and whoever listens to their changes."""

    def __init__(self, listener: Changes) -> None:
        self._listener = listener
        self._store: BlockStore
        self._lower: list[LowerTier] = []
        self._run: Callable[[Coroutine[Any, Any, None], str], None]
        self._waiting: deque[Block] = deque()
        self._changed = asyncio.Event()
        self._climbs = asyncio.Semaphore(_MAX_CLIMBS)
        self._climbing_bytes = 0

    def attach(self, store: BlockStore) -> None:
        """Move blocks of `store`, once `start` is called."""
        self._store = store
        self._lower = store.lower

    def start(self, run: Callable[[Coroutine[Any, Any, None], str], None]) -> None:
        """Begin; `run` starts tasks."""
        store = self._store
        self._run = run
        if store.lower:
            run(self._copy_down(), "copies to the lower tiers")

    # -- down -----------------------------------------------------------------------------------------------------------
    def stored(self, tier: Tier, block: Block) -> None:
        self._listener.stored(tier, block)
        if tier == "dram" and self._lower:
            if len(self._waiting) >= _MAX_WAITING:
                self._waiting.popleft()
                self._store.count("kv_demote_skipped", 1)
            self._waiting.append(block)
            self._changed.set()

    def removed(self, tier: Tier, block: Block, *, evicted: bool) -> None:
        self._listener.removed(tier, block, evicted=evicted)
        if tier == "dram" and evicted:
            for lower in self._lower:
                copy = lower.get(block.digest, block.model_digest)
                if copy is not None:
                    lower.touch([copy])

    async def _copy_down(self) -> None:
        """One after the other, parents first: what the arena evicts later is then below already."""
        dram = self._store.dram
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._waiting:
                block = self._waiting.popleft()
                for tier in self._store.lower:
                    if block.ordinal >= 0:
                        dram.hold(block)
                        try:
                            self._store.count("kv_demoted_blocks", await tier.save(block, dram.image(block)))
                        except KvError:  # too big for the tier, or for its quotas
                            self._store.count("kv_demote_skipped", 1)
                        finally:
                            dram.unhold(block)
            for tier in self._store.lower:
                await tier.settle()

    # -- up -------------------------------------------------------------------------------------------------------------
    def climb(self, key: bytes) -> bool:
        """Bring the block into the arena, if a lower tier holds it and there is room. True: it is under way."""
        if self._store.under_way.is_written(key):
            return True
        for tier in self._store.lower:
            below = tier.index.blocks.get(key)
            if below is not None:
                return self._begin(tier, below)
        return False

    def _begin(self, tier: LowerTier, below: Block) -> bool:
        dram = self._store.dram
        try:
            size_class = dram.segments.size_class(below.size_class.layout, below.size_class.block_bytes)
            block = dram.reserve(below.digest, below.parent_digest, below.model_digest, below.tenant, size_class, STORE_WRITER)
        except KvError:  # too big for the arena, or for its quotas
            return False
        if block is None:
            return False
        self._store.under_way.begin(block.key)
        self._climbing_bytes += size_class.slot_bytes
        self._run(self._climb(tier, below, block), "climb")
        return True

    async def _climb(self, tier: LowerTier, below: Block, block: Block) -> None:
        """Read into the arena's slot. Whoever waits is let go at the deadline, the slot only when the disk is done with it."""
        dram, under_way = self._store.dram, self._store.under_way
        late = asyncio.get_running_loop().call_later(tier.deadline_s, under_way.end, block.key)
        is_whole = False
        try:
            async with self._climbs:
                is_whole = below.ordinal >= 0 and await tier.load(below, dram.image(block))
        finally:
            late.cancel()
            self._climbing_bytes -= block.size_class.slot_bytes
            if is_whole:
                is_whole = dram.commit(block)
            else:
                dram.abandon(block)
            under_way.end(block.key)
        self._store.count(f"kv_climbed_{tier.name}_blocks", is_whole)

    def prefetch(self, keys: list[bytes]) -> int:
        """Let blocks climb that will be wanted soon; no more at once than an eighth of the arena."""
        dram = self._store.dram
        num_begun = 0
        for key in keys:
            if key in dram.index.blocks:
                continue
            if self._climbing_bytes > dram.segments.num_bytes // 8 or not self.climb(key):
                break
            num_begun += 1
        self._store.count("kv_prefetched_blocks", num_begun)
        return num_begun
