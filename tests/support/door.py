"""The HTTP door of a real gateway, with a real router and a simulated worker behind it, in one process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from services.decode.service import DecodeService
from services.gateway.service import GatewayService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.streams import provision
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.cluster import Cluster
from tests.support.http import Web
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NAMESPACE = "httpdoor"
READ_S = 1.0
"""How long the gateway waits for the rest of a request."""
WRITE_S = 1.0
"""How long it waits for a client that takes nothing."""


class Door:
    """What the tests need of the cluster."""

    def __init__(self, gateway: GatewayService, worker: DecodeService) -> None:
        self.gateway = gateway
        self.worker = worker
        self.web = Web(gateway.describe().http_address)

    @property
    def telemetry(self) -> NullTelemetry:
        telemetry = self.gateway.telemetry
        assert isinstance(telemetry, NullTelemetry)
        return telemetry

    async def is_unharmed(self) -> None:
        reply = await self.web.post(TEXT, {"model": MODEL, "prompt": [1000, 1001], "max_tokens": 1})
        assert reply.status == 200, reply.body

    async def is_left(self) -> None:
        """Until no request is in work, and no block in use."""
        await until(lambda: len(self.gateway.sessions) == 0 and not self.worker.jobs())
        self.worker.scheduler.pool.check_integrity()
        assert self.worker.scheduler.pool.num_used == 0


@contextlib.asynccontextmanager
async def open_door(folder: Path) -> AsyncIterator[Door]:
    """The worker takes 2 ms a token."""
    broker = MemoryBroker()
    buses: list[MemoryBus] = []

    async def make_bus() -> MemoryBus:
        buses.append(MemoryBus(broker))
        return buses[-1]

    await provision(await make_bus(), Subjects(NAMESPACE))
    async with Cluster(make_bus, NAMESPACE, folder, "a=0,d=2", read_s=READ_S, write_s=WRITE_S) as cluster:  # type: ignore[arg-type]
        worker = await cluster.decode()
        await cluster.router()
        await cluster.served()
        yield Door(cluster.gateway, worker)
    for bus in buses:
        await bus.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello there", "max_tokens": 3, **fields}
