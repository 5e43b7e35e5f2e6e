"""What an acquire waits for: the leading run of its blocks, brought into the arena from wherever it lies."""

from __future__ import annotations

import time

from services.kvstore.arrivals import Arrivals
from services.kvstore.ladder import Ladder
from services.kvstore.store import BlockStore
from services.kvstore.tiers.base import LowerTier
from services.kvstore.tiers.index import Block
from shared.kv.hashing import split
from shared.messages.kv import KvAcquire
from shared.types import KEY_BYTES, Tier


class LeadingRun:
    """Load or recompute: blocks of lower tiers climb only as far as that is faster than computing them."""

    def __init__(self, store: BlockStore, ladder: Ladder, arrivals: Arrivals) -> None:
        self._store = store
        self._ladder = ladder
        self._arrivals = arrivals

    async def wait(self, message: KvAcquire, held: list[Block]) -> tuple[list[Tier], str]:
        """Wait, no longer than the worker says, until the leading run is in DRAM.

        Blocks of the run are held meanwhile, in `held`. Returns where each lay when asked, and why the run ended if that is known here.
        """
        until_s = time.monotonic() + message.wait_ms / 1000
        hashes = split(message.block_hashes, 32)
        tiers, reason = self._begin(hashes, message, held)
        is_held = {block.digest for block in held}
        for digest in hashes[: len(tiers)]:
            if digest in is_held:
                continue
            while (block := self._store.dram.get(digest, message.model_digest)) is None:
                key, left_s = digest[:KEY_BYTES], until_s - time.monotonic()
                if left_s <= 0 or not self._store.under_way.is_expected(key) or not await self._arrivals.wait(key, left_s):
                    return tiers, reason
            self._store.dram.hold(block)
            held.append(block)
        return tiers, reason

    def _begin(self, hashes: list[bytes], message: KvAcquire, held: list[Block]) -> tuple[list[Tier], str]:
        """Where the leading run lies now; what lies in lower tiers begins to climb, as far as that is faster than computing it."""
        tiers: list[Tier] = []
        slow_ms = 0.0
        for digest in hashes:
            tier = self._store.find(digest, message.model_digest)
            if tier is None:
                if not self._store.under_way.is_expected(digest[:KEY_BYTES]):
                    return tiers, ""
                tiers.append("dram" if self._store.under_way.is_written(digest[:KEY_BYTES]) else "remote")
                continue
            tiers.append(tier.name)
            if tier is self._store.dram:
                block = self._store.dram.index.blocks[digest[:KEY_BYTES]]
                self._store.dram.hold(block)  # what climbs must not push it out
                held.append(block)
                continue
            slow_ms += message.block_ms
            if isinstance(tier, LowerTier) and message.block_ms and tier.estimate_s(self._block_bytes(tier, digest)) * 1000 > slow_ms:
                return tiers[:-1], "slower_than_recompute"
            if not message.wait_ms or not self._ladder.climb(digest[:KEY_BYTES]):
                return tiers[:-1], ""
        return tiers, ""

    @staticmethod
    def _block_bytes(tier: LowerTier, digest: bytes) -> int:
        return tier.index.blocks[digest[:KEY_BYTES]].size_class.slot_bytes
