"""Everything that a store holds, page by page: what a router reads that has missed events."""

from __future__ import annotations

from services.kvstore.events import KvEvents, chains
from services.kvstore.store import BlockStore
from shared.messages.kv import KvSnapshot, KvSnapshotRequest
from shared.types import HostId

PAGE_BLOCKS = 8192
CURSOR_BITS = 32
TIER_STRIDE = 2**28
"""Within a cursor: the tier's number times this, plus the ordinal in the tier."""
MAX_SNAPSHOTS = 256


class Snapshots:
    """A cursor carries the number of its snapshot, whose event sequence is that of its first page: what changed since, events tell."""

    def __init__(self, host: HostId, store: BlockStore, events: KvEvents) -> None:
        self._host = host
        self._store = store
        self._events = events
        self._sequences: dict[int, int] = {}
        self._num_begun = 0

    async def page(self, message: KvSnapshotRequest) -> KvSnapshot:
        """The page at the cursor; 0 begins a snapshot, None ends one."""
        number, start = message.cursor >> CURSOR_BITS, message.cursor % 2**CURSOR_BITS
        if message.cursor == 0:
            number = self._num_begun = (self._num_begun + 1) % MAX_SNAPSHOTS
            self._sequences[number] = self._events.sequence
        sequence = self._sequences.get(number, 0)
        tiers = self._store.tiers
        tier_number, ordinal = divmod(start, TIER_STRIDE)
        if tier_number >= len(tiers):
            return KvSnapshot(self._host, self._events.epoch, sequence, [])
        tier = tiers[tier_number]
        blocks, following = tier.index.page(ordinal, PAGE_BLOCKS)
        after = tier_number * TIER_STRIDE + following if following is not None else (tier_number + 1) * TIER_STRIDE
        is_last = following is None and tier_number + 1 == len(tiers)
        cursor = None if is_last else number << CURSOR_BITS | after
        return KvSnapshot(self._host, self._events.epoch, sequence, chains(tier.name, blocks), cursor)
