"""Fixtures for every test: a real nats-server, and a bus of either kind in a namespace of the test's own."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.bus.base import Bus
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.streams import provision
from shared.messages.subjects import Subjects
from tests.support.nats import NatsServer, connect_to, delete_streams

_numbers = itertools.count()


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


class Buses:
    """Buses of one broker, one for each process that a test plays: `await buses()`. `kind` is memory or nats."""

    def __init__(self, subjects: Subjects, server: NatsServer | None) -> None:
        self.kind = "memory" if server is None else "nats"
        self._subjects = subjects
        self._server = server
        self._broker = MemoryBroker()
        self._made: list[Bus] = []

    async def __call__(self) -> Bus:
        bus = MemoryBus(self._broker) if self._server is None else await connect_to(self._server.url, self._subjects.namespace)
        self._made.append(bus)
        return bus

    async def wipe(self) -> None:
        """Streams, durables and buckets of the namespace are gone."""
        self._broker.wipe()
        if self._server is not None:
            await delete_streams(self._server.url, self._subjects.namespace)

    async def close(self) -> None:
        for bus in self._made:
            await bus.close()
        await self.wipe()


@pytest.fixture(params=["memory", "nats"])
async def make_bus(request: pytest.FixtureRequest, subjects: Subjects) -> AsyncIterator[Buses]:
    """Makes buses over memory and over NATS. Streams and buckets are there; all is closed and deleted at the end."""
    buses = Buses(subjects, request.getfixturevalue("nats_server") if request.param == "nats" else None)
    await provision(await buses(), subjects)
    yield buses
    await buses.close()


@pytest.fixture
async def bus(make_bus: Buses) -> Bus:
    """A bus, over memory and over NATS."""
    return await make_bus()
