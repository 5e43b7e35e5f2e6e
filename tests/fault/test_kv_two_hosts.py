"""Two stores as processes over a real nats-server, each with its arena, as on two machines: pushes, secrets, and a death in the middle."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.bus.nats_bus import NatsBus
from shared.kvclient import KvClient
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.kvstore import LAYOUT, MODEL, Chain, Pool
from tests.support.nats import NatsServer, connect_to
from tests.support.process import ServiceProcess
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(90)

NUM_BLOCKS = 12


class Host:
    """One machine: a store's process, and a worker with a device pool."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.pool = Pool(NUM_BLOCKS)
        self.telemetry = NullTelemetry()
        self.process: ServiceProcess
        self.client: KvClient

    async def start(self, url: str, namespace: str, bus: NatsBus, secret: Path) -> None:
        variables = {"SS_NATS_URL": url, "SS_NAMESPACE": namespace, "SS_NAME": self.name, "SS_KV_DIR": str(self.folder)}
        sizes = {"SS_KV_DRAM": "2M", "SS_CLUSTER_SECRET_FILE": str(secret), "SS_METRICS_PORT": "0"}
        self.process = await ServiceProcess.start("services.kvstore", variables | sizes)
        await self.process.until_state("ready")
        self.client = KvClient(bus, Subjects(namespace), self.telemetry, secrets.token_hex(4), self.folder, LAYOUT, MODEL, self.pool)
        await self.client.open()

    async def load(self, chain: Chain, wait_ms: float = 5_000) -> tuple[int, str]:
        loaded = await self.client.load(chain.hashes, chain.packed, range(NUM_BLOCKS), wait_ms=wait_ms)
        return loaded.num_blocks, loaded.reason


class Pair:
    """Two machines that share a NATS, and a secret or not."""

    def __init__(self, server: NatsServer, namespace: str, root: Path, bus: NatsBus) -> None:
        self._server, self._namespace, self._root, self._bus = server, namespace, root, bus
        self.hosts: list[Host] = []

    async def start(self, *words: bytes) -> list[Host]:
        for number, word in enumerate(words):
            folder = self._root / f"host-{number}"
            folder.mkdir(mode=0o700)
            secret = self._root / f"secret-{number}"
            secret.write_bytes(word)
            secret.chmod(0o600)
            host = Host(folder, f"kvstore-{number}")
            self.hosts.append(host)
            await host.start(self._server.url, self._namespace, self._bus, secret)
        return self.hosts

    async def close(self) -> None:
        for host in self.hosts:
            await host.client.close()
            await host.process.close()


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def pair(own_nats_server: NatsServer, namespace: str, root: Path) -> AsyncIterator[Pair]:
    bus = await connect_to(own_nats_server.url, namespace)
    made = Pair(own_nats_server, namespace, root, bus)
    yield made
    await made.close()
    await bus.close()


async def test_what_is_handed_over_is_pushed_and_comes_out_byte_for_byte(pair: Pair) -> None:
    first, second = await pair.start(b"the same secret for both", b"the same secret for both")
    first.pool.fill()
    for number in range(8):
        chain = Chain(NUM_BLOCKS, first_token=100 * number)
        stored = await first.client.store(chain.to_store(), handoff_host=second.client.host)
        assert (stored.num_stored, stored.reason) == (NUM_BLOCKS, "")
        assert await second.load(chain) == (NUM_BLOCKS, "")
        assert np.array_equal(second.pool.data, first.pool.data)


async def test_another_secret_gets_nothing_and_costs_a_miss(pair: Pair) -> None:
    first, second = await pair.start(b"the secret of the first", b"another one, of the second")
    first.pool.fill()
    chain = Chain(NUM_BLOCKS)
    stored = await first.client.store(chain.to_store(), handoff_host=second.client.host)
    assert stored.num_stored == NUM_BLOCKS, "the push is beside it"
    assert await second.load(chain, wait_ms=500) == (0, "under_way"), "announced, and never taken"
    assert await first.load(chain) == (NUM_BLOCKS, ""), "its own host has them"


async def test_a_store_killed_while_blocks_come_in_holds_whole_ones_only(pair: Pair) -> None:
    first, second = await pair.start(b"the same secret for both", b"the same secret for both")
    first.pool.fill()
    chains = [Chain(NUM_BLOCKS, first_token=1000 + 100 * number) for number in range(10)]
    storing = asyncio.gather(*(first.client.store(chain.to_store(), handoff_host=second.client.host) for chain in chains))
    await asyncio.sleep(0.005)
    second.process.send(signal.SIGKILL)
    results = await storing
    assert all(result.num_stored + result.num_present == NUM_BLOCKS for result in results), "the sender is unharmed"
    assert [await second.load(chain, wait_ms=0) for chain in chains[:1]] == [(0, "store_absent")]
    await second.process.ended()
    await second.client.close()
    secret = pair.hosts[1].folder.parent / "secret-1"
    await second.start(pair._server.url, pair._namespace, pair._bus, secret)
    for chain in chains:
        num_blocks, _ = await second.load(chain, wait_ms=0)
        assert np.array_equal(second.pool.data[:num_blocks], first.pool.data[:num_blocks]), "torn blocks are found by nobody"
    again = Chain(NUM_BLOCKS, first_token=9000)
    await until(lambda: first.client.host is not None)
    assert (await first.client.store(again.to_store(), handoff_host=second.client.host)).num_stored == NUM_BLOCKS
    assert await second.load(again) == (NUM_BLOCKS, "")
