"""The contract of a tier, and what all tiers with slots share: room, quotas, eviction, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from services.kvstore.segments import Segments, SizeClass
from services.kvstore.tiers.index import Block, TierIndex
from services.kvstore.tiers.shares import MakePolicy, Share
from shared.errors import KvError
from shared.types import Tier as TierName


class Changes(Protocol):
    """Who wants to know what a tier holds (`events.py`)."""

    def stored(self, tier: TierName, block: Block) -> None: ...

    def removed(self, tier: TierName, block: Block, *, evicted: bool) -> None: ...


class Quota:
    """Fractions of a tier: what one model and one tenant may take at most (1.0: all of it)."""

    def __init__(self, model: float = 1.0, tenant: float = 1.0) -> None:
        self.model = model
        self.tenant = tenant


class Tier(ABC):
    """Blocks in slots of size classes. A slot is taken (`take`), filled, and either held under its block's key (`insert`) or given back."""

    name: TierName

    def __init__(self, segments: Segments, make_policy: MakePolicy, quota: Quota, changes: Changes) -> None:
        self.segments = segments
        self.index = TierIndex(make_policy)
        self.quota = quota
        self._changes = changes
        self._model_bytes: Counter[bytes] = Counter()
        self._tenant_bytes: Counter[str] = Counter()

    @abstractmethod
    def close(self) -> None:
        """Let go of the file. What it holds stays. Idempotent."""

    # -- room ---------------------------------------------------------------------------------------------------------
    def take(self, size_class: SizeClass, model_digest: bytes, tenant: str, key: bytes) -> int | None:
        """Byte offset of a slot for a new block, evicting if need be; None: all that may go is in use."""
        self._check_quota(size_class)
        own = self.index.shares.get((size_class.layout, model_digest, tenant))
        if self._is_over_quota(size_class, model_digest, tenant):
            offset = self._evict_from([own] if own else [], key)
        else:
            offset = self.segments.take_slot(size_class)
            if offset is None:
                offset = self._evict_from(self._victims(size_class, own), key)
            if offset is None and self._reclaim(size_class):
                offset = self.segments.take_slot(size_class)
        if offset is not None:
            self._charge(size_class, model_digest, tenant, 1)
        return offset

    def free(self, block: Block) -> None:
        """Give back the slot of a block that is not (or no longer) in the index and that nobody holds."""
        self._charge(block.size_class, block.model_digest, block.tenant, -1)
        self.segments.give_back(block.size_class, block.offset)

    # -- holding ------------------------------------------------------------------------------------------------------
    def get(self, digest: bytes, model_digest: bytes) -> Block | None:
        return self.index.get(digest, model_digest)

    def insert(self, block: Block) -> None:
        """A filled slot can be found from now on."""
        self.index.insert(block)
        self._changes.stored(self.name, block)

    def touch(self, chain: Iterable[Block]) -> None:
        """The chain was used; `chain` runs from its first block on."""
        for block in reversed(list(chain)):
            if block.ordinal >= 0:
                self.index.touch(block)

    def hold(self, block: Block) -> None:
        self.index.hold(block)

    def unhold(self, block: Block) -> None:
        """One hold less; the slot of a block dropped meanwhile becomes free with the last one."""
        self.index.unhold(block)
        if block.num_holds == 0 and block.ordinal < 0:
            self._release_slot(block)

    def drop(self, block: Block) -> int:
        """Forget a block and its descendants; returns how many. Slots in use become free when they are let go."""
        if block.ordinal < 0:
            return 0
        dropped = self.index.remove(block)
        for one in dropped:
            self._changes.removed(self.name, one, evicted=False)
            if one.num_holds == 0:
                self._release_slot(one)
        return len(dropped)

    def drop_model(self, model_digest: bytes) -> int:
        """Forget all blocks of a model and give its size classes back where nothing is left in them."""
        blocks = [block for block in self.index.blocks.values() if block.model_digest == model_digest]
        num_dropped = sum(self.drop(block) for block in blocks)
        for size_class in {block.size_class for block in blocks}:
            for extent in list(size_class.extents.values()):
                if set(self.segments.slots_of(extent)) <= set(size_class.free):
                    self.segments.drop_extent(size_class, extent)
        return num_dropped

    def _release_slot(self, block: Block) -> None:
        """The block is gone and nobody holds it."""
        self.free(block)

    # -- eviction -----------------------------------------------------------------------------------------------------
    def _evict_from(self, shares: Iterable[Share], key: bytes) -> int | None:
        for share in shares:
            block = self.index.evict(share, key)
            if block is not None:
                self._changes.removed(self.name, block, evicted=True)
                self._charge(block.size_class, block.model_digest, block.tenant, -1)
                return block.offset
        return None

    def _victims(self, size_class: SizeClass, own: Share | None) -> Iterable[Share]:
        """Whose blocks go: those of the asking share if it has its fair part already, else the biggest share's; then anybody's."""
        shares = self.index.shares
        if own is not None and own.num_blocks * shares.num_of(size_class.layout) >= size_class.num_slots:
            yield own
        yield from shares.biggest_first(size_class.layout)

    def _reclaim(self, size_class: SizeClass) -> bool:
        """Take an extent from the class that has most, if that is more than its fair part of the tier. Rare: a new model came."""
        fair = self.segments.num_segments / max(len(self.segments.classes), 1)

        def room(one: SizeClass) -> int:
            return len(one.extents) * one.extent_segments

        others = [one for one in self.segments.classes.values() if one is not size_class]
        richest = max(others, key=room, default=None)
        if richest is None or room(richest) <= fair or room(size_class) + size_class.extent_segments > fair:
            return False
        return any(self._empty_extent(richest, first) for first in list(richest.extents)) and self._has_room(size_class)

    def _has_room(self, size_class: SizeClass) -> bool:
        return self.segments.num_free >= size_class.extent_segments or self._reclaim(size_class)

    def _empty_extent(self, size_class: SizeClass, first: int) -> bool:
        """Drop what lies in an extent, unless some of it is in use, and give the extent back."""
        extent = size_class.extents[first]
        offsets = set(self.segments.slots_of(extent))
        free = offsets & set(size_class.free)
        inside = [block for block in self.index.blocks.values() if block.size_class is size_class and block.offset in offsets]
        if len(inside) + len(free) < len(offsets) or any(block.num_holds for block in inside):
            return False
        for block in inside:
            self.drop(block)
        if not offsets <= set(size_class.free):
            return False
        self.segments.drop_extent(size_class, extent)
        return True

    # -- quotas -------------------------------------------------------------------------------------------------------
    def _charge(self, size_class: SizeClass, model_digest: bytes, tenant: str, num_slots: int) -> None:
        num_bytes = num_slots * size_class.slot_bytes
        self._model_bytes[model_digest] += num_bytes
        self._tenant_bytes[tenant] += num_bytes
        if not self._model_bytes[model_digest]:
            del self._model_bytes[model_digest]
        if not self._tenant_bytes[tenant]:
            del self._tenant_bytes[tenant]

    def _is_over_quota(self, size_class: SizeClass, model_digest: bytes, tenant: str) -> bool:
        size, room = size_class.slot_bytes, self.segments.num_bytes
        if self.quota.model < 1.0 and self._model_bytes[model_digest] + size > self.quota.model * room:
            return True
        return self.quota.tenant < 1.0 and self._tenant_bytes[tenant] + size > self.quota.tenant * room

    def _check_quota(self, size_class: SizeClass) -> None:
        limit = min(self.quota.model, self.quota.tenant) * self.segments.num_bytes
        if size_class.slot_bytes > limit:
            raise KvError(f"a block takes {size_class.slot_bytes} bytes, the quota is {int(limit)}")

    def models(self) -> list[bytes]:
        """model_digests that have slots here."""
        return list(self._model_bytes)

    def check_integrity(self) -> None:
        """For tests: slots of the index are distinct and not free."""
        self.index.check_integrity()
        for size_class in self.segments.classes.values():
            used = [block.offset for block in self.index.blocks.values() if block.size_class is size_class]
            assert len(set(used)) == len(used)
            assert not set(used) & set(size_class.free)
            assert len(set(size_class.free)) == len(size_class.free)


class LowerTier(Tier):
    """A tier below the arena: the store moves blocks between it and arena slots, which have the same form."""

    deadline_s: float
    """No caller is kept waiting longer for one block."""

    @abstractmethod
    async def save(self, upper: Block, image: memoryview) -> bool:
        """Keep a copy of a block of the arena, whose slot `image` the caller holds until this returns. False: not now, or there already."""

    @abstractmethod
    async def load(self, block: Block, into: memoryview) -> bool:
        """Fill an arena slot (but for generation and state) with a block that is held here, and verify it.

        False: it could not be read; if it was damaged, it is dropped with its descendants. `into` is untouched once this returns.
        """

    @abstractmethod
    def estimate_s(self, num_bytes: int) -> float:
        """How long `num_bytes` would take to load from now, by what was measured and what is queued; 0 while unknown."""

    @abstractmethod
    async def settle(self) -> None:
        """Make what was decided last, now and then."""
