"""A worker's client and a whole store over a bus: bytes in, the same bytes out, and every fault a miss."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.kvstore.config import KvStoreConfig
from shared.bus.base import Message
from shared.errors import BusTimeout
from shared.kv import slot
from shared.kvclient import KvClient
from shared.messages.codec import decode, decode_union, encode
from shared.messages.kv import (
    BlocksRemoved,
    BlocksStored,
    KvCommit,
    KvCommitReply,
    KvError,
    KvEventBatch,
    KvPrefetch,
    KvSnapshot,
    KvSnapshotRequest,
)
from shared.telemetry import NullTelemetry
from tests.support.kvhost import SUBJECTS, Host
from tests.support.kvstore import LAYOUT, MODEL, Chain, Pool
from tests.support.local_bus import LocalBus


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def bus() -> LocalBus:
    return LocalBus()


@pytest.fixture
async def host(bus: LocalBus, root: Path) -> AsyncIterator[Host]:
    made = Host(bus, root, "one")
    await made.start()
    yield made
    await made.close()


def filled(num_blocks: int = 16) -> Pool:
    pool = Pool(num_blocks)
    pool.fill()
    return pool


async def test_blocks_travel_from_pool_to_pool(host: Host) -> None:
    chain, source, target = Chain(6), filled(), Pool(16)
    writer, reader = await host.client(source), await host.client(target, "bbbbbbbb")
    stored = await writer.store(chain.to_store())
    assert stored == (6, 0, 6 * LAYOUT.block_bytes, "")
    assert (await writer.store(chain.to_store()))[:2] == (0, 6)
    loaded = await reader.load(chain.hashes, chain.packed, [8, 9, 10, 11, 12, 13])
    assert loaded == (6, 6 * LAYOUT.block_bytes, ["dram"] * 6, "")
    assert np.array_equal(target.data[8:14], source.data[:6])
    await host.bus.settle()
    assert len(host.service.store.leases) == 0
    host.service.store.check_integrity()


async def test_the_longest_leading_run_is_loaded(host: Host) -> None:
    short, long = Chain(3), Chain(5)
    client = await host.client(filled())
    await client.store(short.to_store())
    loaded = await client.load(long.hashes, long.packed, range(5))
    assert (loaded.num_blocks, loaded.reason) == (3, "cold")


async def test_many_blocks_go_by_windows(bus: LocalBus, root: Path) -> None:
    host = Host(bus, root, "big")
    host.config = KvStoreConfig(kv_dir=host.directory, kv_dram=16 * 2**20)
    await host.start()
    chain, source, target = Chain(600), filled(600), Pool(600)
    writer, reader = await host.client(source), await host.client(target, "bbbbbbbb")
    assert (await writer.store(chain.to_store())).num_stored == 600
    assert (await reader.load(chain.hashes, chain.packed, range(600))).num_blocks == 600
    assert np.array_equal(target.data, source.data)
    await host.close()


@pytest.mark.parametrize("where", ["payload", "tokens", "digest"])
async def test_a_damaged_block_is_a_miss_and_is_dropped(host: Host, where: str) -> None:
    chain, client = Chain(4), await host.client(filled())
    await client.store(chain.to_store())
    store = host.service.store
    offset = store.dram.index.blocks[chain.hashes[2][:16]].offset
    at = {"payload": slot.HEADER_BYTES + 100, "tokens": 257, "digest": 70}[where]
    store.dram.memory[offset + at] ^= 16
    loaded = await client.load(chain.hashes, chain.packed, range(4))
    assert (loaded.num_blocks, loaded.reason) == (2, "corrupt")
    await host.bus.settle()
    assert host.count("kvclient_corrupt_blocks") == 1
    assert len(store.dram.index) == 2
    await client.store(chain.to_store())
    assert (await client.load(chain.hashes, chain.packed, range(4))).num_blocks == 4


async def test_wrong_tokens_are_never_loaded(host: Host) -> None:
    """Even if somebody asked with a digest that is not of these tokens."""
    chain, client = Chain(2), await host.client(filled())
    await client.store(chain.to_store())
    other = Chain(2, first_token=77)
    loaded = await client.load(chain.hashes, other.packed, range(2))
    assert (loaded.num_blocks, loaded.reason) == (0, "corrupt")


async def test_no_store_is_a_miss(bus: LocalBus, root: Path) -> None:
    telemetry = NullTelemetry()
    client = KvClient(bus, SUBJECTS, telemetry, "aaaaaaaa", root / "none", LAYOUT, MODEL, Pool(4))  # type: ignore[arg-type]
    await client.open()
    chain = Chain(2)
    assert client.host is None
    assert (await client.load(chain.hashes, chain.packed, range(2))).reason == "store_absent"
    assert (await client.store(chain.to_store())).reason == "store_absent"
    assert sum(telemetry.counts.values()) >= 2
    await client.close()


async def test_a_store_that_stands_still_is_a_miss_and_left_alone_for_a_second(host: Host) -> None:
    now_s = [0.0]
    chain = Chain(2)
    client = KvClient(host.bus, SUBJECTS, host.telemetry, "aaaaaaaa", host.directory, LAYOUT, MODEL, filled(), monotonic=lambda: now_s[0])
    host.clients.append(client)
    await client.open()
    await client.store(chain.to_store())
    host.bus.mute.add(SUBJECTS.kv(host.service.host, "acquire"))
    assert (await client.load(chain.hashes, chain.packed, range(2))).reason == "store_absent"
    host.bus.mute.clear()
    assert (await client.load(chain.hashes, chain.packed, range(2))).reason == "store_absent"
    now_s[0] += 1.5
    assert (await client.load(chain.hashes, chain.packed, range(2))).num_blocks == 2


async def test_a_killed_store_comes_back_with_its_blocks(host: Host) -> None:
    chain, client = Chain(3), await host.client(filled())
    await client.store(chain.to_store())
    epoch = host.service.store.dram.epoch
    await host.kill()
    assert (await client.load(chain.hashes, chain.packed, range(3))).reason == "store_absent"
    await host.start()
    assert host.service.store.dram.epoch == epoch + 1
    client._link._retry_at_s = 0.0
    assert (await client.load(chain.hashes, chain.packed, range(3))).num_blocks == 3


async def test_a_new_arena_is_mapped_again(host: Host) -> None:
    chain, client = Chain(3), await host.client(filled())
    await client.store(chain.to_store())
    old = client.host
    await host.kill()
    (host.directory / "arena").unlink()
    await host.start()
    assert (await client.load(chain.hashes, chain.packed, range(3))).reason == "store_absent"
    client._link._retry_at_s = 0.0
    assert (await client.load(chain.hashes, chain.packed, range(3))).reason == "cold"
    assert client.host == host.service.host != old
    assert (await client.store(chain.to_store())).num_stored == 3


async def test_a_cancelled_load_waits_for_its_copy_before_it_lets_go(host: Host) -> None:
    chain, pool = Chain(4), filled()
    pool.is_on_host = False
    client = await host.client(pool)
    await client.store(chain.to_store())
    entered, go_on = asyncio.Event(), threading.Event()
    loop, copied = asyncio.get_running_loop(), []
    imported = pool.import_blocks

    def slow(block_ids: Any, data: Any) -> None:
        loop.call_soon_threadsafe(entered.set)
        go_on.wait(5)
        imported(block_ids, data)
        copied.append(list(block_ids))

    pool.import_blocks = slow  # type: ignore[method-assign]
    task = asyncio.create_task(client.load(chain.hashes, chain.packed, range(4)))
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert len(host.service.store.leases) == 1
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(copied) == 4
    await host.bus.settle()
    assert len(host.service.store.leases) == 0


async def test_a_lost_answer_to_a_reservation_leaks_no_slots(host: Host) -> None:
    chain, client = Chain(4), await host.client(filled())
    subject = SUBJECTS.kv(host.service.host, "reserve")
    answer = host.bus.handlers[subject]
    times: list[int] = []

    async def lose_the_first(message: Message) -> bytes:
        reply = await answer(message)
        times.append(1)
        if len(times) == 1:
            raise BusTimeout(subject, 1.0)
        return reply

    host.bus.handlers[subject] = lose_the_first
    assert (await client.store(chain.to_store())).reason == "store_absent"
    store = host.service.store
    store.leases._queue[0].deadline_s = 0.0
    store.tick()
    assert store.dram.num_expired == 4
    client._link._retry_at_s = 0.0
    assert (await client.store(chain.to_store())).num_stored == 4
    assert store.dram.num_expired == 0


async def test_refusals_are_typed_replies(host: Host) -> None:
    reply = await host.bus.request(SUBJECTS.kv(host.service.host, "commit"), encode(KvCommit("aaaaaaaa", 99)), timeout_s=1.0)
    answer = decode_union(KvCommitReply | KvError, reply.payload)
    assert isinstance(answer, KvError) and answer.code == "lease_expired"
    reply = await host.bus.request(SUBJECTS.kv(host.service.host, "reserve"), b"\xc1junk", timeout_s=1.0)
    assert decode(KvError, reply.payload).code == "malformed_message"


async def test_routers_are_told_in_order_and_a_snapshot_agrees(host: Host) -> None:
    client = await host.client(filled())
    chains = [Chain(4), Chain(3, first_token=500)]
    for chain in chains:
        await client.store(chain.to_store())
    subject = SUBJECTS.kv_event(host.service.host)
    while not any(sent == subject for sent, _ in host.bus.published):
        await asyncio.sleep(0.001)
    store = host.service.store
    store.drop(store.dram.index.blocks[chains[0].hashes[2][:16]])
    await asyncio.sleep(0.01)
    batches = [decode(KvEventBatch, payload) for sent, payload in host.bus.published if sent == subject]
    assert [batch.sequence for batch in batches] == list(range(1, len(batches) + 1))
    held: set[bytes] = set()
    for event in (event for batch in batches for event in batch.events):
        if isinstance(event, BlocksStored):
            held |= {event.block_keys[at : at + 16] for at in range(0, len(event.block_keys), 16)}
        elif isinstance(event, BlocksRemoved):
            held -= {event.block_keys[at : at + 16] for at in range(0, len(event.block_keys), 16)}
    assert held == set(store.dram.index.blocks)
    reply = await host.bus.request(SUBJECTS.kv(host.service.host, "snapshot"), encode(KvSnapshotRequest()), timeout_s=1.0)
    page = decode(KvSnapshot, reply.payload)
    assert (page.epoch, page.sequence, page.next_cursor) == (store.dram.epoch, batches[-1].sequence, None)
    assert {entry.block_keys[at : at + 16] for entry in page.entries for at in range(0, len(entry.block_keys), 16)} == held


# -- two hosts ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def secret(root: Path) -> Path:
    path = root / "secret"
    path.write_bytes(b"0123456789abcdef0123456789abcdef")
    path.chmod(0o600)
    return path


async def two_hosts(bus: LocalBus, root: Path, secret: Path, other_secret: Path | None = None) -> tuple[Host, Host]:
    """Two stores that know each other's address (as from their leases)."""
    one, two = Host(bus, root, "one", secret), Host(bus, root, "two", other_secret or secret)
    await one.start()
    await two.start()
    leases = [one.service.describe(), two.service.describe()]
    for host in (one, two):
        host.service.fleet.workers = lambda role, model=None: leases if role == "kvstore" else []  # type: ignore[method-assign]
    return one, two


async def test_a_handoff_is_pushed_and_the_other_host_waits_for_it(bus: LocalBus, root: Path, secret: Path) -> None:
    one, two = await two_hosts(bus, root, secret)
    chain, source, target = Chain(6), filled(), Pool(16)
    writer, reader = await one.client(source), await two.client(target, "bbbbbbbb")
    stored = await writer.store(chain.to_store(), handoff_host=reader.host)
    assert stored.num_stored == 6
    loaded = await reader.load(chain.hashes, chain.packed, range(6), wait_ms=5000)
    assert loaded.num_blocks == 6 and loaded.reason == ""
    assert np.array_equal(target.data[:6], source.data[:6])
    while one.count("kv_push_bytes") < 6 * LAYOUT.block_bytes:
        await asyncio.sleep(0.001)
    assert two.count("kv_taken_bytes") == 6 * LAYOUT.block_bytes
    for host in (one, two):
        await bus.settle()
        host.service.store.check_integrity()
        assert all(block.num_holds == 0 for block in host.service.store.dram.index.blocks.values())
        await host.close()


async def test_the_wrong_secret_is_refused_and_counted(bus: LocalBus, root: Path, secret: Path) -> None:
    wrong = root / "wrong"
    wrong.write_bytes(b"another secret, quite another one")
    wrong.chmod(0o600)
    one, two = await two_hosts(bus, root, secret, wrong)
    chain = Chain(3)
    writer, reader = await one.client(filled()), await two.client(Pool(8), "bbbbbbbb")
    await writer.store(chain.to_store(), handoff_host=reader.host)
    while not two.count("kv_peer_refused") or not one.count("kv_push_blocks"):
        await asyncio.sleep(0.001)
    assert (await reader.load(chain.hashes, chain.packed, range(3))).num_blocks == 0
    assert (await writer.load(chain.hashes, chain.packed, range(3))).num_blocks == 3
    assert ("kv_push_blocks", (("outcome", "failed"),)) in one.telemetry.counts
    for host in (one, two):
        await host.close()


async def test_what_never_comes_is_waited_for_no_longer_than_told(bus: LocalBus, root: Path, secret: Path) -> None:
    one, two = await two_hosts(bus, root, secret)
    chain, reader = Chain(3), await two.client(Pool(8), "bbbbbbbb")
    assert (await reader.load(chain.hashes, chain.packed, range(3), wait_ms=60_000)).reason == "cold"
    announcement = KvPrefetch(MODEL, b"".join(digest[:16] for digest in chain.hashes), [one.service.host], True)
    await bus.publish(SUBJECTS.kv(two.service.host, "prefetch"), encode(announcement))
    await bus.settle()
    assert (await reader.load(chain.hashes, chain.packed, range(3), wait_ms=20)).reason == "under_way"
    for host in (one, two):
        await host.close()


async def test_frames_that_are_too_big_or_no_messages_end_the_connection_only(bus: LocalBus, root: Path, secret: Path) -> None:
    host = Host(bus, root, "one", secret)
    await host.start()
    address = host.service.describe().kv_address
    name, _, port = address.rpartition(":")
    for junk in (b"\xff\xff\xff\xff" + bytes(64), (5).to_bytes(4, "little") + b"\xc1junk", b"GET / HTTP/1.1\r\n\r\n"):
        reader, writer = await asyncio.open_connection(name, int(port))
        writer.write(junk)
        with contextlib.suppress(ConnectionResetError):
            while await reader.read(4096):
                pass
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    chain, client = Chain(2), await host.client(filled())
    assert (await client.store(chain.to_store())).num_stored == 2
    await host.close()
