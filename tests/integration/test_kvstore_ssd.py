"""Down to the SSD and up again: with the arena a fraction of the working set, across restarts, and never a wrong byte."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.kvstore.config import KvStoreConfig
from services.kvstore.tiers.ssd import SsdTier
from shared.messages.codec import decode, encode
from shared.messages.kv import KvPrefetch, KvSnapshot, KvSnapshotRequest
from tests.support.kvhost import SUBJECTS, Host
from tests.support.kvstore import LAYOUT, MODEL, Chain, Pool
from tests.support.local_bus import LocalBus


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def host(root: Path, tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(LocalBus(), root, "one")
    made.config = KvStoreConfig(kv_dir=made.directory, kv_dram=2**20, kv_ssd=f"{tmp_path}/ssd:16M")
    await made.start()
    yield made
    await made.close()


def ssd_of(host: Host) -> SsdTier:
    (tier,) = host.service.store.lower
    assert isinstance(tier, SsdTier)
    return tier


async def copied(host: Host, num_blocks: int) -> None:
    """Until the SSD holds so many."""
    while len(ssd_of(host).index) < num_blocks:
        await asyncio.sleep(0.001)


async def fill(host: Host, num_chains: int) -> tuple[list[Chain], Pool]:
    """More than the arena holds: chains of 12 blocks, one after the other."""
    pool = Pool(12 * num_chains)
    pool.fill()
    client = await host.client(pool)
    chains = [Chain(12, first_token=1000 * number) for number in range(num_chains)]
    for number, chain in enumerate(chains):
        stored = await client.store(chain.to_store(range(12 * number, 12 * number + 12)))
        assert stored.num_stored == 12
        await copied(host, 12 * number + 12)
    return chains, pool


async def load_all(host: Host, chains: list[Chain], pool: Pool, instance: str = "bbbbbbbb") -> set[str]:
    """Every chain comes back whole and exact; returns the tiers they came from."""
    target = Pool(12)
    client = await host.client(target, instance)
    tiers: set[str] = set()
    for number, chain in enumerate(chains):
        loaded = await client.load(chain.hashes, chain.packed, range(12), wait_ms=5000)
        assert (loaded.num_blocks, loaded.reason) == (12, ""), number
        assert np.array_equal(target.data, pool.data[12 * number : 12 * number + 12])
        tiers |= set(loaded.tiers)
    return tiers


async def test_a_working_set_of_four_arenas_comes_back_exactly(host: Host) -> None:
    chains, pool = await fill(host, 40)
    assert len(host.service.store.dram.index) < 12 * 40 / 3
    assert "ssd" in await load_all(host, chains, pool)
    host.service.store.check_integrity()


async def test_a_killed_store_finds_its_ssd_blocks_again(host: Host) -> None:
    chains, pool = await fill(host, 10)
    await host.kill()
    (host.directory / "arena").unlink()
    await host.start()
    assert len(ssd_of(host).index) == 120 and len(host.service.store.dram.index) == 0
    assert await load_all(host, chains, pool, "cccccccc") == {"ssd"}


async def test_a_snapshot_says_what_lies_in_each_tier(host: Host) -> None:
    await fill(host, 20)
    held: dict[str, set[bytes]] = {"dram": set(), "ssd": set()}
    cursor: int | None = 0
    while cursor is not None:
        subject = SUBJECTS.kv(host.service.host, "snapshot")
        reply = await host.bus.request(subject, encode(KvSnapshotRequest(cursor)), timeout_s=1.0)
        page = decode(KvSnapshot, reply.payload)
        for entry in page.entries:
            held[entry.tier] |= {entry.block_keys[at : at + 16] for at in range(0, len(entry.block_keys), 16)}
        cursor = page.next_cursor
    for tier in host.service.store.tiers:
        assert held[tier.name] == set(tier.index.blocks)


async def test_without_time_to_wait_nothing_climbs(host: Host) -> None:
    chains, _ = await fill(host, 20)
    client = await host.client(Pool(12), "bbbbbbbb")
    assert (await client.load(chains[0].hashes, chains[0].packed, range(12))).num_blocks == 0


async def test_what_is_slower_than_computing_is_not_loaded(host: Host) -> None:
    chains, pool = await fill(host, 20)
    await load_all(host, chains[:1], pool)
    await fill_up(host)
    client = await host.client(Pool(12), "dddddddd")
    loaded = await client.load(chains[0].hashes, chains[0].packed, range(12), wait_ms=5000, block_ms=1e-9)
    assert (loaded.num_blocks, loaded.reason) == (0, "slower_than_recompute")


async def fill_up(host: Host) -> None:
    """Push everything else out of the arena."""
    client = await host.client(Pool(12), "eeeeeeee")
    for number in range(20):
        await client.store(Chain(12, first_token=500_000 + 1000 * number).to_store())


async def test_a_prefetched_chain_is_in_the_arena_when_it_is_asked_for(host: Host) -> None:
    chains, _ = await fill(host, 20)
    keys = [digest[:16] for digest in chains[0].hashes]
    dram = host.service.store.dram
    assert keys[0] not in dram.index.blocks
    await host.bus.publish(SUBJECTS.kv(host.service.host, "prefetch"), encode(KvPrefetch(MODEL, b"".join(keys))))
    while not all(key in dram.index.blocks for key in keys):
        await asyncio.sleep(0.001)
    client = await host.client(Pool(12), "bbbbbbbb")
    assert (await client.load(chains[0].hashes, chains[0].packed, range(12))).tiers == ["dram"] * 12


async def test_a_block_of_another_host_is_fetched_ahead(root: Path, tmp_path: Path) -> None:
    secret = root / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    bus = LocalBus()
    one, two = Host(bus, root, "one", secret), Host(bus, root, "two", secret)
    await one.start()
    await two.start()
    leases = [one.service.describe(), two.service.describe()]
    for host in (one, two):
        host.service.fleet.workers = lambda role, model=None: leases if role == "kvstore" else []  # type: ignore[method-assign]
    pool, target = Pool(4), Pool(4)
    pool.fill()
    chain = Chain(4)
    await (await one.client(pool)).store(chain.to_store())
    keys = b"".join(digest[:16] for digest in chain.hashes)
    await bus.publish(SUBJECTS.kv(two.service.host, "prefetch"), encode(KvPrefetch(MODEL, keys, [one.service.host])))
    await bus.settle()
    reader = await two.client(target, "bbbbbbbb")
    assert (await reader.load(chain.hashes, chain.packed, range(4), wait_ms=5000)).num_blocks == 4
    assert np.array_equal(target.data, pool.data)
    for host in (one, two):
        await host.close()


async def test_quota_is_never_exceeded(host: Host, tmp_path: Path) -> None:
    await fill(host, 5)
    client = await host.client(Pool(12), "eeeeeeee")
    for number in range(250):
        await client.store(Chain(12, first_token=500_000 + 1000 * number).to_store())
        await asyncio.sleep(0.002)
    size = sum(file.stat().st_blocks * 512 for file in (tmp_path / "ssd").iterdir())
    assert size <= 16 * 2**20 + 2**20
    assert len(ssd_of(host).index) * 2 * LAYOUT.block_bytes <= 16 * 2**20
    host.service.store.check_integrity()
