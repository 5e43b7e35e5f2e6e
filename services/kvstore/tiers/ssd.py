"""The SSD tier: slots of one slab file, byte for byte as in the arena, and a journalled index. Verified at every read."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from services.kvstore.segments import Segments
from services.kvstore.tiers.base import Changes, LowerTier, Quota
from services.kvstore.tiers.breaker import Breaker
from services.kvstore.tiers.index import Block
from services.kvstore.tiers.journal import BlockGone, BlockPut, ExtentCut, ExtentFreed, Geometry, Journal, Record, fold
from services.kvstore.tiers.shares import MakePolicy
from services.kvstore.tiers.slab import SlabFile, aligned_buffer, check_folder, open_slab, set_aside_above_floor
from services.kvstore.tiers.throughput import Throughput
from shared.errors import EnvironmentFault, SlipstreamError
from shared.kv import slot
from shared.kv.arena import Extent, segment_bytes_for

_log = logging.getLogger(__name__)

DEADLINE_S = 1.0
_MAX_READS = 32
_MAX_WRITES = 8
_COMPACT_FROM = 4096

CountFault = Callable[[str, int], None]


class SsdTier(LowerTier):
    """Reads run in four threads (two keep a disk busy while two verify), writes and the journal in one, in order.

    Nothing waits longer than the deadline, whatever the disk does.
    """

    name = "ssd"

    def __init__(
        self,
        directory: Path,
        num_bytes: int,
        make_policy: MakePolicy,
        quota: Quota,
        changes: Changes,
        *,
        monotonic: Callable[[], float],
        count: CountFault,
        deadline_s: float = DEADLINE_S,
        wrap: Callable[[SlabFile], SlabFile] = lambda slab: slab,
    ) -> None:
        check_folder(directory)
        self._journal = Journal(directory)
        self._slab = wrap(open_slab(directory))
        self._count = count
        self.deadline_s = deadline_s
        self.breaker = Breaker(monotonic)
        records = list(self._journal.replay())
        segment_bytes = next((record.segment_bytes for record in records if isinstance(record, Geometry)), 0)
        if not segment_bytes:
            segment_bytes = segment_bytes_for(num_bytes)
            records = []
            self._journal.rewrite([Geometry(segment_bytes)])
        if num_bytes < segment_bytes:
            raise EnvironmentFault(f"the SSD tier has {num_bytes} bytes, it needs at least {segment_bytes}", remedy="give --kv-ssd more")
        super().__init__(Segments(num_bytes // segment_bytes, segment_bytes, 0, self._save_extent), make_policy, quota, changes)
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="ssd-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ssd-write")
        self._scratch = threading.local()
        self._pending: list[Record] = []
        self.num_reads = self.num_writes = 0
        """Under way now, hung ones included."""
        self._throughput = Throughput()
        self.quarantined: set[int] = set()
        """Offsets of slots whose bytes were damaged: not used again until the next start."""
        self._is_set_aside = set_aside_above_floor(self._slab, 0, self.segments.num_bytes)
        """All room at once if the disk has it now; else extent by extent, as it is needed and becomes free."""
        self._adopt(records)
        if not self._slab.is_direct:
            self._count("kv_ssd_buffered", 1)
            _log.warning("the file system of %s has no O_DIRECT: the SSD tier reads and writes through the page cache", directory)

    # -- start --------------------------------------------------------------------------------------------------------
    def _adopt(self, records: list[Record]) -> None:
        """Believe the journal: extents, then the blocks that it last put into their slots."""
        extents, held = fold(records)
        for cut in extents.values():
            self._adopt_extent(Extent(cut.first, cut.num_segments, cut.layout, cut.block_bytes), held)

    def _adopt_extent(self, extent: Extent, held: dict[int, BlockPut]) -> None:
        try:
            if extent.first + extent.num_segments > self.segments.num_segments:
                raise EnvironmentFault("the tier was bigger before")
            size_class = self.segments.size_class(extent.layout, extent.block_bytes)
            self.segments.adopt(size_class, extent)
        except SlipstreamError as error:
            _log.warning("an extent of the SSD tier is given up: %s", error)
            return
        for offset in self.segments.slots_of(extent):
            put = held.get(offset)
            if put is None or put.layout != extent.layout or put.digest[:16] in self.index.blocks:
                self.segments.give_back(size_class, offset)
                continue
            block = Block(put.digest, put.parent, put.model_digest, put.tenant, size_class, offset, 0)
            self._charge(size_class, block.model_digest, block.tenant, 1)
            self.index.insert(block)

    # -- room ---------------------------------------------------------------------------------------------------------
    def _save_extent(self, extent: Extent, in_use: bool) -> bool:
        """Set the extent's room aside, if the disk has it and stays above its floor."""
        if not in_use:
            self._pending.append(ExtentFreed(extent.first))
            return True
        if not self._is_set_aside:  # asks the file system on the event loop: rare, and only where it had no room for all at the start
            size = self.segments.segment_bytes
            if not set_aside_above_floor(self._slab, extent.first * size, extent.num_segments * size):
                self._count("kv_ssd_full", 1)
                return False
        self._pending.append(ExtentCut(extent.first, extent.num_segments, extent.layout, extent.block_bytes))
        return True

    # -- bytes --------------------------------------------------------------------------------------------------------
    async def save(self, upper: Block, image: memoryview) -> bool:
        """Write a block that a tier above holds (and keeps for so long): `image` is its slot there. False: not now, or there already."""
        if self.breaker.is_open or self.num_writes >= _MAX_WRITES or self.get(upper.digest, upper.model_digest) is not None:
            return False
        size_class = self.segments.size_class(upper.size_class.layout, upper.size_class.block_bytes)
        offset = self.take(size_class, upper.model_digest, upper.tenant, upper.key)
        if offset is None:
            return False
        block = Block(upper.digest, upper.parent_digest, upper.model_digest, upper.tenant, size_class, offset, 0)
        put = BlockPut(offset, size_class.layout, block.digest, block.parent_digest, block.model_digest, block.tenant)
        self.num_writes += 1
        before, self._pending = self._pending, []
        future = asyncio.get_running_loop().run_in_executor(self._writer, self._write, before, put, image)
        done, _ = await asyncio.wait([future], timeout=self.deadline_s)
        if not done:
            # The image must stay as it is until the disk is done with it: the caller waits on.
            self._fault("deadline")
            await asyncio.wait([future])
        self.num_writes -= 1
        has_failed = self._failed(future)
        if has_failed:
            self._pending = before + self._pending
        if has_failed or self.get(upper.digest, upper.model_digest) is not None:
            self._give_up(block)
            return False
        self.breaker.success()
        self.insert(block)
        return True

    def _write(self, before: list[Record], put: BlockPut, image: memoryview) -> None:
        """In the writer's thread: first what makes the slot ours, then its bytes, then the record that makes them findable."""
        self._journal.append([*before, BlockGone(put.offset)])
        self._slab.write(put.offset, image)
        self._journal.append([put])

    async def load(self, block: Block, into: memoryview) -> bool:
        if self.breaker.is_open or self.num_reads >= _MAX_READS:
            return False
        self.hold(block)
        self.num_reads += 1
        size = block.size_class.slot_bytes
        begun_s = self._throughput.begin(size)
        future = asyncio.get_running_loop().run_in_executor(self._readers, self._read, block, into)
        try:
            done, _ = await asyncio.wait([future], timeout=self.deadline_s)
            if not done:
                self._fault("deadline")
                await asyncio.wait([future])
                return False
            self._throughput.measure(begun_s)
            if self._failed(future):
                return False
            self.breaker.success()
            if not future.result():
                self._quarantine(block)  # while we hold it: a damaged parent may have dropped it meanwhile
            return future.result()
        finally:
            self.num_reads -= 1
            self._throughput.end(size)
            self.unhold(block)

    def _read(self, block: Block, into: memoryview) -> bool:
        """In a reader's thread."""
        first: memoryview | None = getattr(self._scratch, "page", None)
        if first is None:
            first = self._scratch.page = aligned_buffer()
        size = block.size_class.slot_bytes
        if self._slab.read(block.offset, [first, into[slot.ALIGNMENT : size]]) != size:
            return False
        into[slot.OWNED_BYTES : slot.ALIGNMENT] = first[slot.OWNED_BYTES :]
        header = slot.read_header(into, 0)
        return (
            header.digest == block.digest
            and header.model_digest == block.model_digest
            and 0 < header.length <= block.size_class.block_bytes
            and slot.is_sealed(into, 0)
            and xxhash.xxh3_64_intdigest(slot.payload(into, 0, header.length)) == header.checksum
        )

    def estimate_s(self, num_bytes: int) -> float:
        return self._throughput.estimate_s(num_bytes)

    def _failed(self, future: asyncio.Future[Any]) -> bool:
        error = future.exception()
        if error is None:
            return False
        if not isinstance(error, OSError):
            raise error
        self._fault("io")
        _log.warning("the SSD failed: %s", error.strerror)
        return True

    def _fault(self, kind: str) -> None:
        self._count(f"kv_ssd_{kind}_faults", 1)
        opened = self.breaker.num_opened
        self.breaker.fault()
        if self.breaker.num_opened > opened:
            self._count("kv_ssd_breaker_opened", 1)
            _log.warning("the SSD tier is left alone for a while")

    def _quarantine(self, block: Block) -> None:
        """Its bytes are not what was written."""
        if block.offset in self.quarantined:
            return  # another reader saw it first
        self._count("kv_corrupt", 1)
        self.quarantined.add(block.offset)
        self._pending.append(BlockGone(block.offset))
        block.num_holds += 1  # never let go: the slot is not used again
        self.drop(block)
        _log.warning("a block on the SSD was damaged; its slot is not used again")

    def _give_up(self, block: Block) -> None:
        self._pending.append(BlockGone(block.offset))
        self.free(block)

    def _release_slot(self, block: Block) -> None:
        self._pending.append(BlockGone(block.offset))
        super()._release_slot(block)

    # -- the journal --------------------------------------------------------------------------------------------------
    async def settle(self) -> None:
        """Write what the journal does not say yet; shorten it when most of it is history. Called now and then."""
        if self.breaker.is_open or self.num_writes:
            return
        pending, self._pending = self._pending, []
        records: list[Record] | None = None
        if self._journal.num_records > max(_COMPACT_FROM, 4 * len(self.index)):
            records = self._live_records()
        elif not pending:
            return
        work = (lambda: self._journal.rewrite(records)) if records is not None else (lambda: self._journal.append(pending))
        self.num_writes += 1
        future = asyncio.get_running_loop().run_in_executor(self._writer, work)
        await asyncio.wait([future])
        self.num_writes -= 1
        if self._failed(future):
            self._pending = pending + self._pending

    def _live_records(self) -> list[Record]:
        records: list[Record] = [Geometry(self.segments.segment_bytes)]
        for size_class in self.segments.classes.values():
            records += [ExtentCut(*extent) for extent in size_class.extents.values()]
        for block in self.index.blocks.values():
            layout = block.size_class.layout
            records.append(BlockPut(block.offset, layout, block.digest, block.parent_digest, block.model_digest, block.tenant))
        return records

    def close(self) -> None:
        """What is under way ends first, unless the disk hangs."""
        is_hung = self.breaker.is_open
        self._readers.shutdown(wait=not is_hung)
        self._writer.shutdown(wait=not is_hung)
        if not is_hung:
            with contextlib.suppress(OSError):
                self._journal.append(self._pending)
            self._slab.close()
            self._journal.close()
