"""Fixtures for every test: a real nats-server, and a bus of either kind in a namespace of the test's own."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.streams import provision
from shared.messages.subjects import Subjects
from tests.support.nats import NatsServer, connect_to, delete_streams

_numbers = itertools.count()

MakeBus = Callable[[], Awaitable[Bus]]


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server for the whole session. Tests that hurt it take `own_nats_server`."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.close()


@pytest.fixture
def own_nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server for one test: kill it, stop it, wipe it."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.close()


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has."""
    return f"t{os.getpid()}x{next(_numbers)}"


@pytest.fixture
def subjects(namespace: str) -> Subjects:
    return Subjects(namespace)


@pytest.fixture(params=["memory", "nats"])
async def make_bus(request: pytest.FixtureRequest, subjects: Subjects) -> AsyncIterator[MakeBus]:
    """Makes buses of one broker, one for each process that the test plays. Streams and buckets are there; all is closed at the end."""
    buses: list[Bus] = []
    broker = MemoryBroker()
    server = request.getfixturevalue("nats_server") if request.param == "nats" else None

    async def make() -> Bus:
        bus = MemoryBus(broker) if server is None else await connect_to(server.url, subjects.namespace)
        buses.append(bus)
        return bus

    await provision(await make(), subjects)
    yield make
    for bus in buses:
        await bus.close()
    if server is not None:
        await delete_streams(server.url, subjects.namespace)


@pytest.fixture
async def bus(make_bus: MakeBus) -> Bus:
    """A bus, over memory and over NATS."""
    return await make_bus()
