"""Blocks that the store itself writes into the arena: from other hosts, and from the tiers below."""

from __future__ import annotations

from services.kvstore.store import BlockStore
from services.kvstore.tiers.index import Block
from shared.errors import KvError
from shared.kv import slot
from shared.kv.hashing import split
from shared.messages.kv import BlockHead, BlockOffer
from shared.types import KEY_BYTES

STORE_WRITER = "store"
"""Stands in the headers of slots that the store fills. It holds no lock: after a crash it is gone by definition."""


class Incoming:
    """Slots taken for blocks that arrive, and what becomes of them."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._dram = store.dram

    def payload(self, block: Block, num_bytes: int) -> memoryview:
        """Where the block's bytes shall lie."""
        return slot.payload(self._dram.memory, block.offset, num_bytes)

    def reserve(self, offer: BlockOffer) -> dict[int, Block]:
        """Slots for the blocks of an offer that are missing here, by index; as many as find room. Raises KvError."""
        hashes, parents = split(offer.block_hashes, 32), split(offer.parents, 32)
        if len(hashes) != len(parents) or len(hashes) != len(offer.tenants):
            raise KvError(f"an offer of {len(hashes)} blocks with {len(parents)} parents and {len(offer.tenants)} tenants")
        size_class = self._dram.segments.size_class(offer.layout, offer.block_bytes)
        reserved: dict[int, Block] = {}
        for index, (digest, parent, tenant) in enumerate(zip(hashes, parents, offer.tenants, strict=True)):
            key = digest[:KEY_BYTES]
            present = self._dram.get(digest, offer.model_digest)
            if present is not None:
                if offer.handoff:
                    self._store.pin(present)
                self._store.under_way.end(key)
            elif not self._store.under_way.is_written(key):
                block = self._dram.reserve(digest, parent, offer.model_digest, tenant, size_class, STORE_WRITER)
                if block is None:
                    break
                self._store.under_way.begin(key)
                reserved[index] = block
        return reserved

    def commit(self, block: Block, head: BlockHead, checksum: int, *, handoff: bool) -> bool:
        """The payload lies in the slot and has this checksum; hold it if that is what its head promised."""
        if checksum != head.checksum:
            self._store.count("kv_corrupt", 1)
            self.abandon(block)
            return False
        slot.write_content(
            self._dram.memory,
            block.offset,
            writer=STORE_WRITER,
            packed_tokens=head.token_ids,
            payload_format=head.format,
            length=head.length,
            checksum=head.checksum,
        )
        is_held = self._dram.commit(block)
        if is_held and handoff:
            self._store.pin(block)
        self._store.under_way.end(block.key)
        return is_held

    def abandon(self, block: Block) -> None:
        """The block did not arrive."""
        self._dram.abandon(block)
        self._store.under_way.end(block.key)
