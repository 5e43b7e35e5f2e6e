"""Any sequence of what workers, time, disks and crashes do to a store: a get is the exact bytes or a miss, and nothing leaks (T38)."""

from __future__ import annotations

import asyncio
import errno
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.kvstore.policies import POLICIES
from shared.errors import KvError, LeaseExpired
from shared.kv import slot
from shared.messages.kv import KvCommit, KvReserveReply
from tests.support.kvssd import Ssd
from tests.support.kvstore import LAYOUT, MODEL, Chain, Store

CHAINS = [Chain(length, first_token=1000 * number) for number, length in enumerate((3, 8, 8, 12, 20, 5, 16, 8, 9, 12, 24, 7))]
TENANTS = ["a", "b"]
WORKERS = ["aaaaaaaa", "bbbbbbbb", "cccccccc"]

chains = st.sampled_from(range(len(CHAINS)))
workers = st.sampled_from(WORKERS)


class StoreMachine(RuleBasedStateMachine):
    """132 blocks over an arena of 56 and an SSD of 88, and three workers that may be slow, stopped or dead."""

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
        self.policy = policy
        self.open()
        self.written: dict[str, list[tuple[Chain, KvReserveReply]]] = {worker: [] for worker in WORKERS}
        self.reading: list[tuple[str, Chain, Any]] = []

    def open(self) -> None:
        self.store = Store(self.directory, num_bytes=2**19, policy=self.policy)
        self.store.locks = getattr(self, "locks", {})
        self.locks = self.store.locks
        self.ssd = Ssd(self.directory / "ssd", self.store, num_bytes=2**19 + 2**18, policy=self.policy, deadline_s=5.0)
        self.store.store.lower = [self.ssd.tier]
        self.store.ladder.attach(self.store.store)
        self.tasks: list[asyncio.Task[None]] = []
        self.store.ladder._run = self.run_task

    def run_task(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.tasks.append(self.loop.create_task(work))

    def settle(self) -> None:
        """Everything under way ends."""
        if self.tasks:
            self.loop.run_until_complete(asyncio.gather(*self.tasks))
        self.tasks = []

    # -- workers that do all at once -----------------------------------------------------------------------------------
    @rule(several=st.lists(chains, min_size=1, max_size=6), worker=workers, tenant=st.sampled_from(TENANTS), handoff=st.booleans())
    def put(self, several: list[int], worker: str, tenant: str, handoff: bool) -> None:
        for chain in several:
            self.store.put(CHAINS[chain], worker, tenant, self.store.store.dram.arena.host if handoff else None)

    @rule(several=st.lists(chains, min_size=1, max_size=6), worker=workers)
    def get(self, several: list[int], worker: str) -> None:
        for chain in several:
            reply = self.store.acquire(CHAINS[chain], worker)
            self.check_bytes(CHAINS[chain], reply)
            if reply.lease_id:
                self.store.release(reply.lease_id, worker)

    # -- workers that take their time -----------------------------------------------------------------------------------------------------
    @rule(worker=workers, chain=chains, tenant=st.sampled_from(TENANTS))
    def reserve(self, worker: str, chain: int, tenant: str) -> None:
        reply = self.store.reserve(CHAINS[chain], worker, tenant)
        if reply.lease_id:
            self.written[worker].append((CHAINS[chain], reply))

    @precondition(lambda self: any(self.written.values()))
    @rule(writes=st.booleans(), handoff=st.booleans())
    def commit(self, writes: bool, handoff: bool) -> None:
        worker = self.somebody_writing()
        chain, reply = self.written[worker].pop(0)
        if writes:
            self.write_carefully(worker, chain, reply)
        else:
            self.spoil(reply)
        try:
            host = self.store.store.dram.arena.host if handoff else None
            self.store.store.commit(KvCommit(worker, reply.lease_id, host))
        except LeaseExpired:
            pass

    def write_carefully(self, worker: str, chain: Chain, reply: KvReserveReply) -> None:
        """As the client does: only into slots that are still ours."""
        memory = self.store.store.dram.memory
        places = [place for place in reply.slots if not place.present]
        if all(slot.read_state(memory, place.offset) == (place.generation, slot.SlotState.RESERVED) for place in places):
            self.store.write(chain, reply)

    def spoil(self, reply: KvReserveReply) -> None:
        """A writer that commits without having written anything that could pass."""
        memory = self.store.store.dram.memory
        for place in reply.slots:
            if not place.present and slot.read_state(memory, place.offset)[0] == place.generation:
                slot.write_content(memory, place.offset, writer="", packed_tokens=b"", payload_format="", length=0, checksum=0)

    def somebody_writing(self) -> str:
        return next(worker for worker in WORKERS if self.written[worker])

    @precondition(lambda self: any(self.written.values()))
    @rule()
    def a_stopped_writer_writes_late(self) -> None:
        """It passed its check, was stopped, and writes now, whatever has happened: its slots must belong to nobody else."""
        chain, reply = self.written[self.somebody_writing()][0]
        self.store.write(chain, reply, fill=lambda index: 255)

    @precondition(lambda self: any(self.written.values()))
    @rule()
    def give_up(self) -> None:
        worker = self.somebody_writing()
        _, reply = self.written[worker].pop(0)
        try:
            self.store.release(reply.lease_id, worker)
        except KvError:
            pass

    @precondition(lambda self: self.locks)
    @rule()
    def die(self) -> None:
        """Its lock is free, it writes no more; its leases are still there."""
        worker = next(iter(self.locks))
        self.store.leave(worker)
        self.written[worker] = []

    @rule(worker=workers, chain=chains)
    def acquire(self, worker: str, chain: int) -> None:
        reply = self.store.acquire(CHAINS[chain], worker)
        self.check_bytes(CHAINS[chain], reply)
        if reply.lease_id:
            self.reading.append((worker, CHAINS[chain], reply))

    @precondition(lambda self: self.reading)
    @rule(bad=st.booleans())
    def release(self, bad: bool) -> None:
        """If the lease lived until now, nothing has touched the blocks in between."""
        worker, chain, reply = self.reading.pop(0)
        if any(lease.lease_id == reply.lease_id for lease in self.store.store.leases.live()):
            self.check_bytes(chain, reply)
        try:
            self.store.release(reply.lease_id, worker, chain.hashes[0] if bad else b"")
        except LeaseExpired:
            return

    def check_bytes(self, chain: Chain, reply: Any) -> None:
        memory = self.store.store.dram.memory
        for index, place in enumerate(reply.slots):
            header = slot.read_header(memory, place.offset)
            payload = slot.payload(memory, place.offset, LAYOUT.block_bytes)
            assert (header.generation, header.digest, header.state) == (place.generation, chain.hashes[index], slot.SlotState.COMMITTED)
            assert bytes(slot.tokens(memory, place.offset)) == chain.packed[index * chain.step : (index + 1) * chain.step]
            assert payload == bytes([index % 251]) * LAYOUT.block_bytes

    @rule(chain=chains, several=st.lists(chains, min_size=3, max_size=6), tenant=st.sampled_from(TENANTS))
    def a_writer_sleeps_through_its_lease(self, chain: int, several: list[int], tenant: str) -> None:
        """The whole course in one rule, because chance rarely strings it together."""
        self.reserve(WORKERS[0], chain, tenant)
        self.wait(6.0)
        self.put(several, WORKERS[1], tenant, False)
        if self.written[WORKERS[0]]:
            late, reply = self.written[WORKERS[0]][-1]
            self.store.write(late, reply, fill=lambda index: 255)
        self.get(several, WORKERS[1])

    # -- the SSD ----------------------------------------------------------------------------------------------------------
    @rule()
    def copy_down(self) -> None:
        dram = self.store.store.dram
        for digest in (digest for chain in CHAINS for digest in chain.hashes):
            block = dram.get(digest, MODEL)
            if block is not None:
                dram.hold(block)
                self.loop.run_until_complete(self.ssd.tier.save(block, dram.image(block)))
                dram.unhold(block)

    @rule(chain=chains, at_once=st.booleans())
    def climb(self, chain: int, at_once: bool) -> None:
        for digest in CHAINS[chain].hashes:
            if self.store.store.dram.get(digest, MODEL) is None:
                self.store.ladder.climb(digest[:16])
        if at_once:
            self.settle()

    @rule()
    def let_climbs_end(self) -> None:
        self.settle()

    @rule(error=st.sampled_from([None, errno.EIO]), full=st.booleans())
    def break_or_mend_the_disk(self, error: int | None, full: bool) -> None:
        self.ssd.disk.read_error = self.ssd.disk.write_error = error
        self.ssd.disk.full = full

    @rule(chain=chains, index=st.integers(0, 19))
    def rot(self, chain: int, index: int) -> None:
        """A bit of a block on the disk flips."""
        block = self.ssd.tier.get(CHAINS[chain].hashes[index % len(CHAINS[chain].hashes)], MODEL)
        if block is not None:
            with (self.directory / "ssd" / "slab").open("r+b") as slab:
                slab.seek(block.offset + slot.HEADER_BYTES)
                byte = slab.read(1)
                slab.seek(block.offset + slot.HEADER_BYTES)
                slab.write(bytes([byte[0] ^ 1]))

    @rule(chain=chains, index=st.integers(0, 19))
    def rot_and_climb(self, chain: int, index: int) -> None:
        """A block that exists only on the disk rots, and is asked for."""
        self.put([chain], WORKERS[1], "a", False)
        self.copy_down()
        block = self.store.store.dram.get(CHAINS[chain].hashes[0], MODEL)
        if block is not None:
            self.store.store.dram.drop(block)
        self.rot(chain, index)
        self.climb(chain, True)
        self.get([chain], WORKERS[1])

    # -- time and death ---------------------------------------------------------------------------------------------------
    @rule(seconds=st.sampled_from([0.5, 3.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.store.clock.now_s += seconds
        self.store.store.tick()
        self.store.store.sweep()

    @rule()
    def the_store_is_killed_and_comes_back(self) -> None:
        self.settle()
        self.ssd.kill()
        old = self.store
        self.open()
        self.store.clock.now_s = old.clock.now_s
        self.reading = []
        old.store.dram.close()

    # -- always -----------------------------------------------------------------------------------------------------------
    @invariant()
    def agrees_with_itself(self) -> None:
        if hasattr(self, "store"):
            self.store.store.check_integrity()

    def teardown(self) -> None:
        """When everybody is done or dead, every slot is free or holds a block that can be found, and nothing is held."""
        if not hasattr(self, "store"):
            return
        self.settle()
        self.store.clock.now_s += 20
        self.store.store.tick()
        for worker in list(self.locks):
            self.store.leave(worker)
        self.store.store.sweep()
        dram = self.store.store.dram
        assert len(self.store.store.leases) == len(self.store.store.pins) == dram.num_expired == 0
        for tier in self.store.store.tiers:
            assert all(block.num_holds == 0 for block in tier.index.blocks.values())
        num_used = sum(size_class.num_used for size_class in dram.segments.classes.values())
        assert num_used == len(dram.index)
        num_on_disk = sum(size_class.num_used for size_class in self.ssd.tier.segments.classes.values())
        assert num_on_disk == len(self.ssd.tier.index) + len(self.ssd.tier.quarantined)
        self.ssd.disk.read_error = None
        self.ssd.tier.close()
        self.store.close()
        self.loop.close()
        shutil.rmtree(self.directory)


StoreMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
TestStoreMachine = StoreMachine.TestCase
