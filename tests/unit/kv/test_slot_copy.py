"""Copies between a pool and slots, for a pool in the host's memory and for one that is not: the block, or a verdict and no trace of it."""

from __future__ import annotations

import numpy as np
import pytest

from shared.kv import slot
from shared.kv.slot_copy import Expected, Place, copy_in, copy_out
from shared.messages.kv import KvCommit
from tests.support.kvstore import LAYOUT, MODEL, WORKER, Chain, Pool, Store

NUM_BLOCKS = 3


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Store:
    made = Store(tmp_path_factory.mktemp("arena"))
    request.addfinalizer(made.close)
    return made


@pytest.fixture(params=[True, False], ids=["on the host", "on a device"])
def is_on_host(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def chain() -> Chain:
    return Chain(NUM_BLOCKS)


def places_of(store: Store, chain: Chain) -> list[Place]:
    return [Place(one.offset, one.generation) for one in store.acquire(chain).slots]


def expected_of(chain: Chain) -> list[Expected]:
    packed = memoryview(chain.packed)
    return [
        Expected(digest, MODEL, packed[index * chain.step : (index + 1) * chain.step], LAYOUT.block_bytes)
        for index, digest in enumerate(chain.hashes)
    ]


def pool_of_noise(is_on_host: bool) -> Pool:
    pool = Pool(NUM_BLOCKS + 1, is_on_host=is_on_host)
    pool.fill()
    return pool


def test_blocks_go_out_and_come_in_to_the_byte(store: Store, chain: Chain, is_on_host: bool) -> None:
    source, target = pool_of_noise(is_on_host), Pool(NUM_BLOCKS + 1, is_on_host=is_on_host)
    reply, memory = store.reserve(chain), store.store.dram.memory
    places = [Place(one.offset, one.generation) for one in reply.slots]
    assert copy_out(memory, places, chain.to_store(), LAYOUT.block_bytes, WORKER, source)
    assert store.store.commit(KvCommit(WORKER, reply.lease_id, None)).num_blocks == NUM_BLOCKS
    assert copy_in(memory, places_of(store, chain), expected_of(chain), [2, 0, 1], target) == (NUM_BLOCKS, "")
    np.testing.assert_array_equal(target.data[[2, 0, 1]], source.data[[block.block_id for block in chain.to_store()]])
    assert not target.data[NUM_BLOCKS].any()


@pytest.mark.parametrize("damage", ["payload", "tokens", "length"])
def test_a_damaged_block_is_corrupt_and_leaves_nothing(store: Store, chain: Chain, is_on_host: bool, damage: str) -> None:
    store.put(chain)
    places, memory, pool = places_of(store, chain), store.store.dram.memory, Pool(NUM_BLOCKS, is_on_host=is_on_host)
    at = {"payload": slot.HEADER_BYTES + LAYOUT.block_bytes - 1, "tokens": 256, "length": slot.OWNED_BYTES}[damage]
    memory[places[1].offset + at] ^= 0xFF
    assert copy_in(memory, places, expected_of(chain), range(NUM_BLOCKS), pool) == (1, "corrupt")
    assert (pool.data[0] == 0).all() and not pool.data[1:].any()  # the first block's bytes are its index


def test_a_slot_that_went_to_somebody_else_is_a_lease_expired_and_leaves_nothing(store: Store, chain: Chain, is_on_host: bool) -> None:
    store.put(chain)
    places, pool = places_of(store, chain), Pool(NUM_BLOCKS, is_on_host=is_on_host)
    old = places[2]._replace(generation=places[2].generation - 1)
    assert copy_in(store.store.dram.memory, [*places[:2], old], expected_of(chain), range(NUM_BLOCKS), pool) == (2, "lease_expired")
    assert (pool.data[1] == 1).all() and not pool.data[2].any()


def test_a_writer_whose_slots_are_gone_writes_nothing(store: Store, chain: Chain, is_on_host: bool) -> None:
    reply = store.reserve(chain)
    places = [Place(one.offset, one.generation) for one in reply.slots]
    memory = store.store.dram.memory
    before = bytes(memory[places[0].offset : places[0].offset + slot.HEADER_BYTES + LAYOUT.block_bytes])
    gone = [*places[:2], places[2]._replace(generation=places[2].generation + 1)]
    assert not copy_out(memory, gone, chain.to_store(), LAYOUT.block_bytes, WORKER, pool_of_noise(is_on_host))
    assert bytes(memory[places[0].offset : places[0].offset + slot.HEADER_BYTES + LAYOUT.block_bytes]) == before
