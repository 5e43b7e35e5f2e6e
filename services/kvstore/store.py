"""The store's decisions: reserve, commit, acquire, release. No I/O, no bus; the clock and the proof of death are injected."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.kvstore.leases import LEASE_TTL_S, PIN_TTL_S, Lease, Leases, Pins
from services.kvstore.tiers.base import LowerTier, Tier
from services.kvstore.tiers.dram import DramTier
from services.kvstore.tiers.index import Block
from services.kvstore.under_way import UnderWay
from shared.errors import KvError, LayoutMismatch, LeaseExpired, OutOfBlocks
from shared.kv.hashing import split
from shared.messages.kv import (
    KvAcquire,
    KvAcquireReply,
    KvCommit,
    KvLookup,
    KvLookupReply,
    KvRelease,
    KvReserve,
    KvReserveReply,
    Slot,
)
from shared.types import KEY_BYTES
from shared.types import Tier as TierName

_PRESENT = Slot(0, 0, True)
_EXPIRED_KEPT = 4096

CountFault = Callable[[str, int], None]
"""(name of a counter, how many)."""


class Committed(NamedTuple):
    """What a commit made findable. `to_push`: blocks that the caller must send to the handoff host, and `unhold` then."""

    num_blocks: int
    to_push: list[Block]


class BlockStore:
    """One host's blocks. `dram` is the tier that workers see; `lower` are the tiers below it, fastest first."""

    def __init__(
        self,
        dram: DramTier,
        lower: list[LowerTier],
        *,
        monotonic: Callable[[], float],
        is_writer_gone: Callable[[str], bool],
        count: CountFault,
        lease_ttl_s: float = LEASE_TTL_S,
        pin_ttl_s: float = PIN_TTL_S,
    ) -> None:
        self.dram = dram
        self.lower = lower
        self.leases = Leases(monotonic, dram.first_lease_id, lease_ttl_s)
        self.pins = Pins(monotonic, dram.segments.num_bytes // 4, pin_ttl_s)
        self._is_writer_gone = is_writer_gone
        self.count = count
        self._known_writers: set[str] = set()
        self.under_way = UnderWay(monotonic)
        self._expired_leases: dict[int, Lease] = {}

    @property
    def tiers(self) -> list[Tier]:
        return [self.dram, *self.lower]

    # -- probing --------------------------------------------------------------------------------------------------------
    def lookup(self, message: KvLookup) -> KvLookupReply:
        """The longest leading run in any tier. Renews and leases nothing."""
        tiers: list[TierName] = []
        for digest in split(message.block_hashes, 32):
            found = self.find(digest, message.model_digest)
            if found is None:
                break
            tiers.append(found.name)
        return KvLookupReply(len(tiers), tiers)

    def find(self, digest: bytes, model_digest: bytes) -> Tier | None:
        """The fastest tier that holds the block."""
        return next((tier for tier in self.tiers if tier.get(digest, model_digest) is not None), None)

    # -- writing --------------------------------------------------------------------------------------------------------
    def reserve(self, message: KvReserve) -> KvReserveReply:
        """Room for blocks in order; stops at the first that finds none. Raises KvError for a request that could never be met."""
        hashes, parents, tenants = self._check_reserve(message)
        size_class = self.dram.segments.size_class(message.layout, message.block_bytes)
        limit = self.dram.segments.num_bytes // size_class.slot_bytes
        if len(hashes) > limit:
            raise OutOfBlocks(len(hashes), limit)
        self._check_writer(message.worker)
        self._free_finished(message.worker, message.finished_below)
        lease = self.leases.grant("write", message.worker, [], [])
        lease.number = message.number
        slots: list[Slot] = []
        for digest, parent, tenant in zip(hashes, parents, tenants, strict=True):
            if self._keep(lease, digest, message.model_digest) or self.under_way.is_written(digest[:KEY_BYTES]):
                slots.append(_PRESENT)
                continue
            self._keep(lease, parent, message.model_digest)
            try:
                block = self.dram.reserve(digest, parent, message.model_digest, tenant, size_class, message.worker)
            except KvError:  # larger than its quota
                self._end_write(self.leases.end(lease.lease_id, message.worker))
                raise
            if block is None:
                break
            lease.blocks.append(block)
            self.under_way.begin(block.key)
            slots.append(Slot(block.offset, block.generation))
        if not lease.blocks and not (message.handoff and lease.kept):
            self._end_write(self.leases.end(lease.lease_id, message.worker))
            return KvReserveReply(0, slots, 0.0, "" if len(slots) == len(hashes) else "no_room")
        return KvReserveReply(lease.lease_id, slots, self.leases.ttl_s, "" if len(slots) == len(hashes) else "no_room")

    def _check_reserve(self, message: KvReserve) -> tuple[list[bytes], list[bytes], list[str]]:
        hashes, parents = split(message.block_hashes, 32), split(message.parents, 32)
        if not hashes or len(message.block_hashes) % 32 or len(message.parents) != len(message.block_hashes):
            raise KvError(f"{len(message.block_hashes)} bytes of hashes and {len(message.parents)} of parents; each block needs 32 of both")
        if len(message.tenants) not in (0, 1, len(hashes)):
            raise KvError(f"{len(message.tenants)} tenants for {len(hashes)} blocks; give one, or one a block")
        tenants = message.tenants or [""]
        return hashes, parents, tenants * len(hashes) if len(tenants) == 1 else tenants

    def _check_writer(self, worker: str) -> None:
        """Only who can be proven gone may write."""
        if worker in self._known_writers:
            return
        if self._is_writer_gone(worker):
            raise KvError(f"worker {worker} holds no lock in writers/; it must before it reserves")
        self._known_writers.add(worker)

    def _free_finished(self, worker: str, finished_below: int) -> None:
        """The writer itself says that it is done with these reservations, whose answers it may never have seen."""
        finished = [lease for lease in self._expired_leases.values() if lease.worker == worker and lease.number < finished_below]
        for lease in finished:
            del self._expired_leases[lease.lease_id]
            self.dram.writer_gone(worker, lease.blocks)

    def _keep(self, lease: Lease, digest: bytes, model_digest: bytes) -> bool:
        """Hold a block that is here already for as long as the lease lives."""
        block = self.dram.get(digest, model_digest)
        if block is None:
            return False
        self.dram.hold(block)
        lease.kept.append(block)
        return True

    def commit(self, message: KvCommit) -> Committed:
        """The lease's slots are written. Raises LeaseExpired; the slots are then free."""
        lease = self._end(message.lease_id, message.worker, "write")
        committed = [block for block in lease.blocks if self.dram.commit(block)]
        handoff = list(dict.fromkeys([*lease.kept, *committed])) if message.handoff_host is not None else []
        is_local = message.handoff_host == self.dram.arena.host
        for block in handoff:
            if is_local:
                self.pin(block)
            else:
                self.dram.hold(block)
        self.count("kv_commit_refused", len(lease.blocks) - len(committed))
        self._end_write(lease)
        return Committed(len(committed), [] if is_local else handoff)

    def pin(self, block: Block) -> None:
        """Keep a block for a handoff, if the pins' share of the arena allows it."""
        if block.ordinal < 0:
            return
        outcome = self.pins.pin(block)
        if outcome == "pinned":
            self.dram.hold(block)
        elif outcome == "full":
            self.count("kv_pin_refused", 1)

    def unpin(self, block: Block) -> None:
        if self.pins.let_go(block):
            self.dram.unhold(block)

    def _end_write(self, lease: Lease) -> None:
        """Let go of what a write lease kept; its own blocks are committed, abandoned or expired by the caller."""
        for block in lease.kept:
            self.dram.unhold(block)
        for block in lease.blocks:
            self.under_way.end(block.key)

    # -- reading --------------------------------------------------------------------------------------------------------
    def acquire(self, message: KvAcquire, tiers: list[TierName] | None = None) -> KvAcquireReply:
        """Lease the longest leading run that lies in DRAM now. `tiers`: where each lay before it climbed."""
        run: list[Block] = []
        for digest in split(message.block_hashes, 32):
            block = self.dram.get(digest, message.model_digest)
            if block is None:
                break
            if block.size_class.layout != message.layout:
                raise LayoutMismatch(block.size_class.layout, message.layout)
            run.append(block)
        num_asked = len(message.block_hashes) // 32
        missing = message.block_hashes[len(run) * 32 :][:KEY_BYTES]
        reason = "" if len(run) == num_asked else "under_way" if self.under_way.is_expected(missing) else "cold"
        if not run:
            return KvAcquireReply(0, [], [], reason)
        self.dram.touch(run)
        for block in run:
            self.dram.hold(block)
            self.unpin(block)
        lease = self.leases.grant("read", message.worker, run, [])
        slots = [Slot(block.offset, block.generation) for block in run]
        return KvAcquireReply(lease.lease_id, slots, (tiers or [])[: len(run)] or ["dram"] * len(run), reason)

    def release(self, message: KvRelease) -> int:
        """End a lease of either kind; returns how many blocks were dropped as bad. Raises LeaseExpired."""
        lease = self._end(message.lease_id, message.worker, None)
        if lease.kind == "write":
            for block in lease.blocks:
                self.dram.abandon(block)
            self._end_write(lease)
            return 0
        bad = set(split(message.bad_hashes, 32)) if message.bad_hashes else set()
        num_dropped = 0
        for block in lease.blocks:
            if block.digest in bad:
                num_dropped += self.drop(block)
        for block in lease.blocks:
            self.dram.unhold(block)
        self.count("kv_corrupt", len(bad))
        return num_dropped

    def drop(self, block: Block) -> int:
        """Forget a block that cannot be trusted, and its descendants, in every tier. Returns how many went from DRAM."""
        for tier in self.lower:
            twin = tier.get(block.digest, block.model_digest)
            if twin is not None:
                tier.drop(twin)
        return self.dram.drop(block)

    def _end(self, lease_id: int, worker: str, kind: str | None) -> Lease:
        try:
            return self.leases.end(lease_id, worker, "write" if kind == "write" else None)
        except LeaseExpired:
            expired = self._expired_leases.get(lease_id)
            if expired is not None and expired.worker == worker:
                # The writer itself says that it is done with these slots: proof enough.
                del self._expired_leases[lease_id]
                self.dram.writer_gone(worker, expired.blocks)
            raise

    # -- time -----------------------------------------------------------------------------------------------------------
    def tick(self) -> None:
        """End what has run out: leases, pins. Call a few times a second."""
        for lease in self.leases.run_out():
            self.count("kv_lease_expired", 1)
            if lease.kind == "read":
                for block in lease.blocks:
                    self.dram.unhold(block)
                continue
            for block in lease.blocks:
                self.dram.expire(block, lease.worker)
            self._end_write(lease)
            self._expired_leases[lease.lease_id] = lease
            if len(self._expired_leases) > _EXPIRED_KEPT:
                del self._expired_leases[next(iter(self._expired_leases))]
        run_out = self.pins.run_out()
        for block in run_out:
            self.dram.unhold(block)
        self.count("kv_pin_expired", len(run_out))
        self.under_way.run_out()

    def sweep(self) -> None:
        """Free expired slots of writers that are proven gone, and forget those writers."""
        self.dram.sweep(self._is_writer_gone)
        self._known_writers.clear()

    def check_integrity(self) -> None:
        """For tests: every slot is free, reserved, expired, held, or dropped but in use."""
        for tier in self.tiers:
            tier.check_integrity()
        reading = {id(block): block for lease in self.leases.live() if lease.kind == "read" for block in lease.blocks}
        num_reserved = sum(len(lease.blocks) for lease in self.leases.live() if lease.kind == "write")
        num_dropped = sum(1 for block in reading.values() if block.ordinal < 0)
        num_used = sum(size_class.num_used for size_class in self.dram.segments.classes.values())
        assert num_used >= len(self.dram.index) + num_reserved + self.dram.num_expired + num_dropped
