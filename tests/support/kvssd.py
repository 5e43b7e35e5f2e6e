"""An SSD tier of its own: blocks go in from a small arena, come out into a buffer; the disk can be made to fail."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from services.kvstore.events import KvEvents
from services.kvstore.policies import POLICIES
from services.kvstore.tiers.base import Quota
from services.kvstore.tiers.index import Block
from services.kvstore.tiers.slab import SlabFile, aligned_buffer
from services.kvstore.tiers.ssd import SsdTier
from shared.kv import slot
from tests.support.kvstore import LAYOUT, MODEL, Chain, Store


class FaultyDisk(SlabFile):
    """The real file behind faults that a test switches on."""

    def __init__(self, slab: SlabFile) -> None:
        super().__init__(slab._fd, is_direct=slab.is_direct)
        self.read_error: int | None = None
        self.write_error: int | None = None
        self.full = False
        self.going_on = threading.Event()
        self.going_on.set()

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        self.going_on.wait(30)
        if self.read_error is not None:
            raise OSError(self.read_error, "injected")
        return super().read(offset, buffers)

    def write(self, offset: int, buffer: memoryview) -> None:
        self.going_on.wait(30)
        if self.write_error is not None:
            raise OSError(self.write_error, "injected")
        super().write(offset, buffer)

    def num_free_bytes(self) -> tuple[int, int]:
        free, total = super().num_free_bytes()
        return (0 if self.full else free), total

    def set_aside(self, offset: int, num_bytes: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "injected")
        super().set_aside(offset, num_bytes)


class Ssd:
    """The tier in `folder`, fed from the arena of `store`."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        *,
        num_bytes: int = 2**20,
        policy: str = "lru",
        quota: Quota | None = None,
        deadline_s: float = 1.0,
    ) -> None:
        self.store = store
        self.counts: Counter[str] = Counter()
        self.events = KvEvents("00000000", 1)
        self.disk: FaultyDisk

        def wrap(slab: SlabFile) -> FaultyDisk:
            self.disk = FaultyDisk(slab)
            return self.disk

        self.tier = SsdTier(
            folder,
            num_bytes,
            POLICIES[policy],
            quota or Quota(),
            self.events,
            monotonic=store.clock,
            count=lambda name, amount: self.counts.update({name: amount}),
            deadline_s=deadline_s,
            wrap=wrap,
        )

    async def put(self, chain: Chain, tenant: str = "", model: bytes = MODEL) -> int:
        """Through the arena onto the disk; returns blocks that the tier took."""
        self.store.put(chain, tenant=tenant, model=model)
        dram = self.store.store.dram
        num_taken = 0
        for digest in chain.hashes:
            upper = dram.get(digest, model)
            if upper is not None:
                dram.hold(upper)
                num_taken += await self.tier.save(upper, dram.image(upper))
                dram.unhold(upper)
        return num_taken

    def block(self, chain: Chain, index: int, model: bytes = MODEL) -> Block | None:
        return self.tier.get(chain.hashes[index], model)

    async def get(self, chain: Chain, index: int) -> bytes | None:
        """The payload as it comes from the disk, or None."""
        block = self.block(chain, index)
        if block is None:
            return None
        into = aligned_buffer(block.size_class.slot_bytes)
        if not await self.tier.load(block, into):
            return None
        return bytes(slot.payload(into, 0, LAYOUT.block_bytes))

    async def num_readable(self, chain: Chain) -> int:
        """Blocks that come back with exactly their bytes; a wrong byte is an assertion."""
        num_good = 0
        for index in range(len(chain.hashes)):
            payload = await self.get(chain, index)
            if payload is not None:
                assert payload == bytes([index % 251]) * LAYOUT.block_bytes
                num_good += 1
        return num_good

    def kill(self) -> None:
        """As kill -9: what the kernel has stays, what is only in our memory is gone."""
        self.tier._slab.close()
        self.tier._journal.close()
