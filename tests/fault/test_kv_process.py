"""The store as a process over a real nats-server: killed, and written to by a process that was stopped."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.bus.base import Bus
from shared.kvclient import KvClient
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.kvstore import LAYOUT, MODEL, Chain, Pool
from tests.support.nats import NatsServer, connect_to
from tests.support.process import ROOT, ServiceProcess

Start = Callable[[str, dict[str, str]], Awaitable[ServiceProcess]]


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def environ(server: NatsServer, namespace: str, directory: Path) -> dict[str, str]:
    return {"SS_NATS_URL": server.url, "SS_NAMESPACE": namespace, "SS_KV_DIR": str(directory), "SS_KV_DRAM": "1M"}


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a service's process; whatever is left of it ends with the test."""
    started: list[ServiceProcess] = []

    async def start_one(module: str, variables: dict[str, str]) -> ServiceProcess:
        started.append(await ServiceProcess.start(module, variables))
        return started[-1]

    yield start_one
    for process in started:
        await process.close()


async def client_of(bus: Bus, namespace: str, directory: Path, pool: Pool, instance: str) -> KvClient:
    client = KvClient(bus, Subjects(namespace), NullTelemetry(), instance, directory, LAYOUT, MODEL, pool)
    await client.open()
    return client


async def test_a_store_killed_with_9_gives_its_blocks_back(
    own_nats_server: NatsServer, namespace: str, directory: Path, start: Start
) -> None:
    variables = environ(own_nats_server, namespace, directory)
    store = await start("services.kvstore", variables)
    await store.until_state("ready")
    bus = await connect_to(own_nats_server.url, namespace)
    pool, target, chain = Pool(8), Pool(8), Chain(8)
    pool.fill()
    writer = await client_of(bus, namespace, directory, pool, "aaaaaaaa")
    reader = await client_of(bus, namespace, directory, target, "bbbbbbbb")
    assert (await writer.store(chain.to_store())).num_stored == 8
    host = writer.host
    store.send(signal.SIGKILL)
    await store.ended()
    assert (await reader.load(chain.hashes, chain.packed, range(8))).reason == "store_absent"
    store = await start("services.kvstore", variables)
    await store.until_state("ready")
    loaded = await client_of(bus, namespace, directory, target, "cccccccc")
    assert loaded.host == host
    assert (await loaded.load(chain.hashes, chain.packed, range(8))).num_blocks == 8
    assert np.array_equal(target.data, pool.data)
    for client in (writer, reader, loaded):
        await client.close()
    store.send(signal.SIGTERM)
    assert await store.ended() == 0
    await bus.close()


async def test_a_stopped_writer_that_wakes_after_its_lease_harms_no_block(
    own_nats_server: NatsServer, namespace: str, directory: Path, start: Start
) -> None:
    store = await start("services.kvstore", environ(own_nats_server, namespace, directory))
    await store.until_state("ready")
    stopped = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.kv_stopped_writer", own_nats_server.url, namespace, str(directory)),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    await asyncio.to_thread(os.waitid, os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    bus = await connect_to(own_nats_server.url, namespace)
    pool, target = Pool(12), Pool(12)
    pool.fill()
    client = await client_of(bus, namespace, directory, pool, "aaaaaaaa")
    reader = await client_of(bus, namespace, directory, target, "bbbbbbbb")
    chains = [Chain(12, first_token=100 * number) for number in range(12)]  # more than the arena holds
    late = Chain(8, first_token=7000)
    while (await client.load(late.hashes, late.packed, range(8))).reason == "under_way":  # until its lease is over
        await asyncio.sleep(0.05)
    for chain in chains:
        assert (await client.store(chain.to_store())).num_stored == 12
    os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.stdout is not None
    assert (await stopped.stdout.read()).split() == [b"0", b"lease_expired"]
    await stopped.wait()
    num_loaded = 0
    for chain in chains:
        loaded = await reader.load(chain.hashes, chain.packed, range(12))
        assert np.array_equal(target.data[: loaded.num_blocks], pool.data[: loaded.num_blocks])
        assert loaded.reason in ("", "cold")
        num_loaded += loaded.num_blocks
    assert num_loaded > 60
    assert (await reader.load(late.hashes, late.packed, range(8))).num_blocks == 0
    await client.close()
    await reader.close()
    store.send(signal.SIGTERM)
    assert await store.ended() == 0
    await bus.close()


async def test_without_room_an_optional_store_goes_on_without_and_says_so(
    nats_server: NatsServer, namespace: str, directory: Path, start: Start
) -> None:
    store = await start("services.kvstore", environ(nats_server, namespace, directory) | {"SS_KV_DRAM": "999T", "SS_KV_OPTIONAL": "1"})
    await store.until_state("ready")
    store.send(signal.SIGTERM)
    assert await store.ended() == 0
    [told] = [line for line in await store.log() if line["level"] == "error"]
    assert "no KV store on this host" in told["message"] and "SS_KV_DRAM" in told["message"] and "traceback" not in told


@pytest.mark.parametrize(
    ("variables", "exit_code", "words"),
    [
        ({"SS_KV_DRAM": "999T"}, 3, "SS_KV_DRAM"),
        ({"SS_KV_DRAM": "some"}, 2, "SS_KV_DRAM"),
        ({"SS_KV_BIND": "everywhere"}, 2, "SS_KV_BIND"),
        ({"SS_KV_POLICY": "belady"}, 2, "SS_KV_POLICY"),
        ({"SS_KV_SSD": "/tmp/x"}, 2, "SS_KV_SSD"),
        ({"SS_CLUSTER_SECRET_FILE": "/nowhere"}, 2, "SS_CLUSTER_SECRET_FILE"),
    ],
)
async def test_a_setting_that_cannot_be_used_ends_it_with_one_line(
    nats_server: NatsServer, namespace: str, directory: Path, variables: dict[str, str], exit_code: int, words: str, start: Start
) -> None:
    store = await start("services.kvstore", environ(nats_server, namespace, directory) | variables)
    failed = await store.until_state("failed")
    assert words in failed["message"] + failed["remedy"]
    assert await store.ended() == exit_code
    assert not any("Traceback" in str(line) for line in await store.log())
