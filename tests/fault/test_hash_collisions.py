"""A hash of eight bits, so that prompts collide all the time: what is loaded is the block of these very tokens, or a miss (T36)."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.kvhost import Host
from tests.support.kvstore import LAYOUT, Chain, Pool
from tests.support.local_bus import LocalBus

NUM_CHAINS = 120
NUM_BLOCKS = 4


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    root = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    made = Host(LocalBus(), root, "one")
    await made.start()
    yield made
    await made.close()
    shutil.rmtree(root)


def weakly_hashed(number: int) -> Chain:
    """No two chains have a token in common; their hashes are 256 kinds of one byte 32 times."""
    chain = Chain(NUM_BLOCKS, first_token=1000 * number)
    chain.hashes = [digest[:1] * len(digest) for digest in chain.hashes]
    return chain


async def test_colliding_hashes_are_misses_and_never_anothers_blocks(host: Host) -> None:
    chains = [weakly_hashed(number) for number in range(NUM_CHAINS)]
    assert len({digest for chain in chains for digest in chain.hashes}) <= 256 < NUM_CHAINS * NUM_BLOCKS
    source, target = Pool(NUM_BLOCKS), Pool(NUM_BLOCKS)
    writer, reader = await host.client(source), await host.client(target, "bbbbbbbb")
    rng = random.Random(36)
    num_loaded = num_refused = 0
    for _ in range(300):
        chain = rng.choice(chains)
        for block in range(NUM_BLOCKS):  # a block's content tells its tokens
            source.data[block] = chain.token_ids[block * LAYOUT.block_size] // 4 % 251
        await writer.store(chain.to_store())
        other = rng.choice(chains)
        target.data[:] = 0
        result = await reader.load(other.hashes, other.packed, range(NUM_BLOCKS))
        for block in range(NUM_BLOCKS):
            expected = other.token_ids[block * LAYOUT.block_size] // 4 % 251 if block < result.num_blocks else 0
            assert np.all(target.data[block] == expected)
        num_loaded += result.num_blocks
        num_refused += result.reason == "corrupt"
    assert num_loaded and num_refused, "both a hit and a collision that the tokens gave away"
    await host.bus.settle()
    host.service.store.check_integrity()
    assert len(host.service.store.leases) == 0
