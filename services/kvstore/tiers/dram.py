"""The DRAM tier: slots of the arena, which workers read and write themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.kvstore.segments import Segments, SizeClass
from services.kvstore.tiers.base import Changes, Quota, Tier
from services.kvstore.tiers.index import Block
from services.kvstore.tiers.shares import MakePolicy
from shared.errors import SlipstreamError
from shared.kv import slot
from shared.kv.arena import Arena, Extent
from shared.kv.slot import SlotState
from shared.types import KEY_BYTES

_SERIALS_PER_EPOCH = 2**40


class DramTier(Tier):
    """Beside the blocks it holds: slots reserved by writers, and slots kept out of use until their writer is proven gone."""

    name = "dram"

    def __init__(self, arena: Arena, make_policy: MakePolicy, quota: Quota, changes: Changes) -> None:
        segments = Segments(arena.num_segments, arena.segment_bytes, arena.data_at, self._save_extent)
        super().__init__(segments, make_policy, quota, changes)
        self.arena = arena
        self.memory = arena.memory
        self.epoch = arena.epoch
        self._next_serial = arena.epoch * _SERIALS_PER_EPOCH + 1
        self._expired: dict[str, list[Block]] = {}
        """By writer."""

    @property
    def first_lease_id(self) -> int:
        """Lease ids of this epoch begin here."""
        return self.epoch * _SERIALS_PER_EPOCH + 1

    @property
    def num_expired(self) -> int:
        """Slots out of use until their writer is proven gone."""
        return sum(len(blocks) for blocks in self._expired.values())

    # -- a slot's life --------------------------------------------------------------------------------------------------
    def reserve(self, digest: bytes, parent: bytes, model_digest: bytes, tenant: str, size_class: SizeClass, writer: str) -> Block | None:
        """A slot for `writer` to fill; None: no room that may be used."""
        offset = self.take(size_class, model_digest, tenant, digest[:KEY_BYTES])
        if offset is None:
            return None
        block = Block(digest, parent, model_digest, tenant, size_class, offset, self._serial())
        slot.write_owner(
            self.memory, offset, block.generation, writer=writer, tenant=tenant, digest=digest, parent=parent, model_digest=model_digest
        )
        return block

    def commit(self, block: Block) -> bool:
        """The writer says that the slot is filled. False (and the slot is free again): its header says otherwise."""
        header = slot.read_header(self.memory, block.offset)
        whole = (
            header.generation == block.generation
            and header.state == SlotState.RESERVED
            and header.digest == block.digest
            and 0 < header.length <= block.size_class.block_bytes
            and 0 < header.num_tokens <= slot.MAX_TOKENS
        )
        if not whole or block.key in self.index.blocks:
            self.abandon(block)
            return False
        slot.seal(self.memory, block.offset)
        slot.write_state(self.memory, block.offset, block.generation, SlotState.COMMITTED)
        self.insert(block)
        return True

    def abandon(self, block: Block) -> None:
        """A reserved slot whose writer is done with it: free."""
        slot.write_state(self.memory, block.offset, self._serial(), SlotState.FREE)
        self.free(block)

    def expire(self, block: Block, writer: str) -> None:
        """A reserved slot whose writer may still write: out of use, under a generation that the writer does not know."""
        block.generation = self._serial()
        slot.write_state(self.memory, block.offset, block.generation, SlotState.EXPIRED)
        self._expired.setdefault(writer, []).append(block)

    def writer_gone(self, writer: str, blocks: list[Block] | None = None) -> int:
        """`writer` writes no more into `blocks` (None: into any): its expired slots are free. Returns how many."""
        expired = self._expired.pop(writer, [])
        chosen = expired if blocks is None else [block for block in expired if block in blocks]
        rest = [block for block in expired if block not in chosen]
        if rest:
            self._expired[writer] = rest
        for block in chosen:
            self.abandon(block)
        return len(chosen)

    def sweep(self, is_gone: Callable[[str], bool]) -> int:
        """Free the expired slots of every writer that is proven gone."""
        return sum(self.writer_gone(writer) for writer in list(self._expired) if is_gone(writer))

    def _release_slot(self, block: Block) -> None:
        slot.write_state(self.memory, block.offset, self._serial(), SlotState.FREE)
        super()._release_slot(block)

    def _serial(self) -> int:
        self._next_serial += 1
        return self._next_serial

    # -- the file ---------------------------------------------------------------------------------------------------------
    def adopt(self) -> int:
        """After a restart: hold committed slots that are whole, keep uncommitted ones out of use, free the rest. Returns blocks held."""
        for extent in self.arena.extents():
            try:
                size_class = self.segments.size_class(extent.layout, extent.block_bytes)
                self.segments.adopt(size_class, extent)
            except SlipstreamError:
                self.arena.save_extent(extent, in_use=False)
                continue
            for offset in self.segments.slots_of(extent):
                self._adopt_slot(size_class, offset)
        return len(self.index)

    def _adopt_slot(self, size_class: SizeClass, offset: int) -> None:
        header = slot.read_header(self.memory, offset)
        block = Block(header.digest, header.parent, header.model_digest, header.tenant, size_class, offset, header.generation)
        self._charge(size_class, block.model_digest, block.tenant, 1)
        if header.state in (SlotState.RESERVED, SlotState.EXPIRED):
            self.expire(block, header.writer)
        elif header.state == SlotState.COMMITTED and slot.is_sealed(self.memory, offset) and block.key not in self.index.blocks:
            self.index.insert(block)
        else:
            self.abandon(block)

    def _save_extent(self, extent: Extent, in_use: bool) -> bool:
        if in_use:
            for offset in self.segments.slots_of(extent):
                slot.write_state(self.memory, offset, self._serial(), SlotState.FREE)
        self.arena.save_extent(extent, in_use=in_use)
        return True

    def image(self, block: Block) -> memoryview:
        """The block's whole slot, in place."""
        return self.memory[block.offset : block.offset + block.size_class.slot_bytes]

    def slots(self) -> Iterator[tuple[int, SlotState]]:
        """For tests: every slot and its state."""
        for size_class in self.segments.classes.values():
            for extent in size_class.extents.values():
                for offset in self.segments.slots_of(extent):
                    yield offset, SlotState(slot.read_state(self.memory, offset)[1])

    def close(self) -> None:
        self.memory = memoryview(b"")
        self.arena.close()
