"""Reserve, commit, acquire, release: what the arena protocol promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import KvError, LayoutMismatch, LeaseExpired, OutOfBlocks
from shared.kv import slot
from shared.kv.slot import SlotState
from shared.messages.kv import KvAcquire, KvCommit, KvLookup, KvRelease, KvReserve
from tests.support.kvstore import LAYOUT, MODEL, WORKER, Chain, Store


def test_what_was_committed_can_be_acquired_byte_for_byte(store: Store) -> None:
    chain = Chain(5)
    assert store.put(chain) == 5
    reply = store.acquire(chain)
    assert [place.present for place in reply.slots] == [False] * 5
    assert reply.tiers == ["dram"] * 5 and reply.reason == ""
    for index, place in enumerate(reply.slots):
        header = slot.read_header(store.store.dram.memory, place.offset)
        assert (header.generation, header.digest, header.state) == (place.generation, chain.hashes[index], SlotState.COMMITTED)
        assert set(slot.payload(store.store.dram.memory, place.offset, LAYOUT.block_bytes)) == {index}
    store.release(reply.lease_id)


def test_a_reserved_block_cannot_be_found_before_its_commit(store: Store) -> None:
    chain = Chain(2)
    reply = store.reserve(chain)
    assert store.acquire(chain).slots == [] and store.acquire(chain).reason == "under_way"
    assert store.store.lookup(KvLookup(MODEL, b"".join(chain.hashes))).num_blocks == 0
    store.write(chain, reply)
    store.store.commit(KvCommit(WORKER, reply.lease_id))
    assert store.num_held(chain) == 2


def test_present_blocks_and_blocks_being_written_need_no_slot(store: Store) -> None:
    long, short = Chain(4), Chain(2)
    store.put(short)
    first = store.reserve(long)
    assert [place.present for place in first.slots] == [True, True, False, False]
    again = store.reserve(long, worker="bbbbbbbb")
    assert [place.present for place in again.slots] == [True] * 4 and again.lease_id == 0
    store.release(first.lease_id)


def test_other_tenants_models_and_layouts_never_match(store: Store) -> None:
    chain = Chain(3)
    store.put(chain)
    assert store.acquire(Chain(3, seed=b"s" * 32)).slots == []
    assert store.acquire(chain, model=b"o" * 32).slots == []
    with pytest.raises(LayoutMismatch):
        store.store.acquire(KvAcquire(WORKER, MODEL, "0" * 16, b"".join(chain.hashes)))


def test_a_colliding_key_is_a_miss(store: Store) -> None:
    """Same 16 bytes, another digest: never the other's block."""
    chain = Chain(1)
    store.put(chain)
    twin = chain.hashes[0][:16] + bytes(16)
    assert store.store.acquire(KvAcquire(WORKER, MODEL, LAYOUT.digest, twin)).slots == []


def test_a_block_beyond_its_quota_is_refused_and_leaves_no_lease(kv_dir: Path) -> None:
    store = Store(kv_dir, kv_tenant_quota=1e-6)
    with pytest.raises(KvError, match="the quota is"):
        store.reserve(Chain(3))
    assert len(store.store.leases) == 0
    store.store.check_integrity()
    store.close()


def test_a_refused_request_leaves_the_store_unharmed(store: Store) -> None:
    chain = Chain(3)
    store.put(chain)
    huge = Chain(4000, first_token=9000)
    with pytest.raises(OutOfBlocks, match=r"4000 blocks asked for, \d+ free"):
        store.reserve(huge)
    with pytest.raises(LeaseExpired):
        store.store.commit(KvCommit(WORKER, 12345))
    with pytest.raises(LeaseExpired):
        store.store.release(KvRelease(WORKER, 12345))
    with pytest.raises(KvError, match="each block needs 32"):
        store.store.reserve(KvReserve(WORKER, MODEL, LAYOUT.digest, LAYOUT.block_bytes, b"", chain.hashes[0]))
    with pytest.raises(LayoutMismatch):
        store.store.reserve(KvReserve(WORKER, MODEL, LAYOUT.digest, 64, chain.seed, chain.hashes[0]))
    with pytest.raises(KvError, match="the limit is the tier's"):
        store.store.reserve(KvReserve(WORKER, MODEL, "0" * 16, 2**30, chain.seed, chain.hashes[0]))
    with pytest.raises(KvError, match="holds no lock"):
        store.store.reserve(KvReserve("cccccccc", MODEL, LAYOUT.digest, LAYOUT.block_bytes, chain.seed, chain.hashes[0]))
    assert store.num_held(chain) == 3


def test_commit_twice_is_refused_and_harms_nothing(store: Store) -> None:
    chain = Chain(2)
    reply = store.reserve(chain)
    store.write(chain, reply)
    commit = KvCommit(WORKER, reply.lease_id)
    assert store.store.commit(commit).num_blocks == 2
    with pytest.raises(LeaseExpired):
        store.store.commit(commit)
    assert store.num_held(chain) == 2


def test_somebody_elses_lease_cannot_be_used(store: Store) -> None:
    reply = store.reserve(Chain(1))
    with pytest.raises(LeaseExpired):
        store.store.commit(KvCommit("bbbbbbbb", reply.lease_id))
    store.release(reply.lease_id)


def test_an_unwritten_slot_is_not_committed(store: Store) -> None:
    chain = Chain(2)
    reply = store.reserve(chain)
    assert store.store.commit(KvCommit(WORKER, reply.lease_id)).num_blocks == 0
    assert store.counts["kv_commit_refused"] == 2
    assert store.num_held(chain) == 0


def test_release_of_a_write_lease_frees_its_slots(store: Store) -> None:
    reply = store.reserve(Chain(3))
    store.release(reply.lease_id)
    assert [state for _, state in store.store.dram.slots() if state != SlotState.FREE] == []


def test_an_expired_writers_slots_stay_out_of_use_until_it_is_gone(store: Store) -> None:
    chain = Chain(3)
    reply = store.reserve(chain)
    store.clock.now_s += 6
    store.store.tick()
    store.store.sweep()
    assert store.store.dram.num_expired == 3
    store.write(chain, reply)  # it wakes, and writes where it was told to
    with pytest.raises(LeaseExpired):
        store.acquire_all = store.store.commit(KvCommit("bbbbbbbb", reply.lease_id))  # type: ignore[attr-defined]
    assert store.num_held(chain) == 0
    assert slot.read_state(store.store.dram.memory, reply.slots[0].offset)[0] != reply.slots[0].generation
    store.leave()
    store.store.sweep()
    assert store.store.dram.num_expired == 0


def test_a_late_commit_tells_that_the_writer_is_done(store: Store) -> None:
    chain = Chain(2)
    reply = store.reserve(chain)
    store.clock.now_s += 6
    store.store.tick()
    with pytest.raises(LeaseExpired):
        store.store.commit(KvCommit(WORKER, reply.lease_id))
    assert store.store.dram.num_expired == 0
    assert store.put(chain) == 2


def test_a_reservation_whose_answer_was_lost_is_freed_by_the_next(store: Store) -> None:
    """The worker lives, but knows no lease to end; it says which of its reservations it is done with."""
    chain, parents = Chain(3), b"".join(Chain(3).parents())

    def reserve(number: int, finished_below: int) -> None:
        hashes = b"".join(chain.hashes)
        store.store.reserve(
            KvReserve(WORKER, MODEL, LAYOUT.digest, LAYOUT.block_bytes, parents, hashes, number=number, finished_below=finished_below)
        )

    store.join()
    reserve(1, 1)
    store.clock.now_s += 6
    store.store.tick()
    reserve(2, 1)  # the first may still be written under
    assert store.store.dram.num_expired == 3
    reserve(3, 2)
    assert store.store.dram.num_expired == 0


def test_expired_slots_are_not_given_to_others(store: Store) -> None:
    stuck = store.reserve(Chain(3))
    store.clock.now_s += 6
    store.store.tick()
    taken = {place.offset for place in stuck.slots}
    for number in range(40):
        other = Chain(8, first_token=1000 * (number + 1))
        reply = store.reserve(other)
        assert not taken & {place.offset for place in reply.slots}
        store.write(other, reply)
        store.store.commit(KvCommit(WORKER, reply.lease_id))


def test_an_acquired_block_is_not_evicted_and_a_probe_renews_nothing(store: Store) -> None:
    chain = Chain(2)
    store.put(chain)
    held = store.acquire(chain)
    generations = [slot.read_state(store.store.dram.memory, place.offset) for place in held.slots]
    for number in range(60):
        store.put(Chain(8, first_token=1000 * (number + 1)))
    assert store.num_held(chain) == 2
    assert [slot.read_state(store.store.dram.memory, place.offset) for place in held.slots] == generations
    store.clock.now_s += 6
    store.store.lookup(KvLookup(MODEL, b"".join(chain.hashes)))
    store.store.tick()
    assert store.counts["kv_lease_expired"] == 1
    for number in range(60):
        store.put(Chain(8, first_token=1000 * (number + 100)))
    assert store.num_held(chain) == 0
    with pytest.raises(LeaseExpired):
        store.release(held.lease_id)


def test_suffixes_go_before_their_parents(store: Store) -> None:
    chain = Chain(20)
    store.put(chain)
    for number in range(60):
        store.put(Chain(1, first_token=10_000 + 8 * number))
        held = [digest[:16] in store.store.dram.index.blocks for digest in chain.hashes]
        assert held == sorted(held, reverse=True)


def test_a_bad_block_is_dropped_with_its_descendants(store: Store) -> None:
    chain = Chain(6)
    store.put(chain)
    reply = store.acquire(chain)
    assert store.release(reply.lease_id, bad=chain.hashes[2]) == 4
    assert store.num_held(chain) == 2
    assert store.counts["kv_corrupt"] == 1


def test_handoff_pins_hold_until_acquired(store: Store) -> None:
    chain = Chain(3)
    host = store.store.dram.arena.host
    store.put(chain, handoff_host=host)
    assert len(store.store.pins) == 3
    for number in range(60):
        store.put(Chain(8, first_token=1000 * (number + 1)))
    reply = store.acquire(chain)
    assert len(reply.slots) == 3 and len(store.store.pins) == 0
    store.release(reply.lease_id)


def test_pins_run_out_and_take_at_most_a_quarter(store: Store) -> None:
    host = store.store.dram.arena.host
    num_slots = store.store.dram.segments.num_bytes // slot.slot_bytes(LAYOUT.block_bytes)
    for number in range(num_slots // 8):
        store.put(Chain(8, first_token=1000 * (number + 1)), handoff_host=host)
    assert 0 < len(store.store.pins) <= num_slots // 4
    assert store.counts["kv_pin_refused"] > 0
    num_pinned = len(store.store.pins)
    store.clock.now_s += 11
    store.store.tick()
    assert store.counts["kv_pin_expired"] == num_pinned
    assert len(store.store.pins) == 0


def test_a_handoff_of_present_blocks_pins_them_too(store: Store) -> None:
    chain = Chain(3)
    store.put(chain)
    assert store.put(chain, handoff_host=store.store.dram.arena.host) == 0
    assert len(store.store.pins) == 3


def test_blocks_for_another_host_are_held_until_they_are_sent(store: Store) -> None:
    chain = Chain(3)
    reply = store.reserve(chain, handoff=True)
    store.write(chain, reply)
    committed = store.store.commit(KvCommit(WORKER, reply.lease_id, "ffffffff"))
    assert [block.digest for block in committed.to_push] == chain.hashes
    assert all(block.num_holds == 1 for block in committed.to_push)
    for block in committed.to_push:
        store.store.dram.unhold(block)


def test_a_full_store_whose_blocks_are_all_in_use_says_no_room(store: Store) -> None:
    replies = []
    for number in range(200):
        reply = store.reserve(Chain(4, first_token=100 * number))
        replies.append(reply)
        if reply.reason:
            break
    assert replies[-1].reason == "no_room" and len(replies[-1].slots) < 4
    for reply in replies:
        if reply.lease_id:
            store.release(reply.lease_id)


def test_a_second_model_gets_its_fair_part(store: Store) -> None:
    for number in range(60):
        store.put(Chain(8, first_token=1000 * (number + 1)))
    assert store.store.dram.segments.num_free == 0
    other = Chain(8, seed=b"q" * 32)
    reply = store.store.reserve(KvReserve(WORKER, b"q" * 32, "ab" * 8, 30_000, b"".join(other.parents()), b"".join(other.hashes)))
    assert sum(1 for place in reply.slots if not place.present) >= 1
    store.release(reply.lease_id)


def test_drop_model_gives_its_room_back(store: Store) -> None:
    store.put(Chain(8))
    free = store.store.dram.segments.num_free
    assert store.store.dram.drop_model(MODEL) == 8
    assert store.store.dram.segments.num_free > free
    assert store.store.dram.models() == []


@pytest.mark.parametrize(("adopted", "uncommitted"), [(5, 3)])
def test_a_killed_store_finds_its_committed_blocks_again(kv_dir: Path, adopted: int, uncommitted: int) -> None:
    before = Store(kv_dir)
    committed, torn = Chain(adopted), Chain(uncommitted, first_token=500)
    before.put(committed)
    reply = before.reserve(torn)
    old_epoch = before.store.dram.epoch
    after = Store(kv_dir)  # nothing was closed: as after kill -9
    assert after.store.dram.epoch == old_epoch + 1
    assert after.store.dram.arena.host == before.store.dram.arena.host
    assert after.num_held(committed) == adopted
    assert after.store.dram.num_expired == uncommitted
    before.write(torn, reply)
    assert [slot.read_state(after.store.dram.memory, place.offset)[1] for place in reply.slots] == [SlotState.EXPIRED] * uncommitted
    assert slot.read_state(after.store.dram.memory, reply.slots[0].offset)[0] != reply.slots[0].generation
    after.store.sweep()
    assert after.store.dram.num_expired == uncommitted
    before.leave()
    after.store.sweep()
    assert after.store.dram.num_expired == 0
    after.store.check_integrity()
    again = after.acquire(committed)
    assert len(again.slots) == adopted
    before.close()
    after.close()


def test_a_slot_whose_header_was_damaged_is_not_adopted(kv_dir: Path) -> None:
    before = Store(kv_dir)
    chain = Chain(3)
    before.put(chain)
    offset = before.store.dram.index.blocks[chain.hashes[1][:16]].offset
    before.store.dram.memory[offset + 260] ^= 1
    after = Store(kv_dir)
    assert after.num_held(chain) == 1
    after.store.check_integrity()
    before.close()
    after.close()


def test_an_arena_of_another_size_is_replaced(kv_dir: Path) -> None:
    before = Store(kv_dir)
    before.put(Chain(2))
    after = Store(kv_dir, num_bytes=2**21)
    assert after.store.dram.arena.host != before.store.dram.arena.host
    assert len(after.store.dram.index) == 0
    before.close()
    after.close()
