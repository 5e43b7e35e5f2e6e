"""A service that does what its settings say, to see how the life cycle takes it. `python -m tests.support.probe_service`."""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import msgspec

from shared.bus.base import Bus
from shared.config import ServiceConfig
from shared.errors import EnvironmentFault
from shared.service import Service, main
from shared.telemetry import Telemetry
from shared.types import InstanceId

Behaviour = Literal["", "fault", "bug", "hang", "thread", "crash", "slow_drain", "late_span", "leave"]


class ProbeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`behaviour`: what goes wrong."""

    service: ServiceConfig = ServiceConfig()
    behaviour: Behaviour = ""


class ProbeService(Service):
    """Notes what is done to it in `calls`."""

    role = "decode"

    def __init__(self, config: ProbeConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self.calls: list[str] = []
        self.traceparent = telemetry.mint_traceparent()

    async def start(self) -> None:
        self.calls.append("start")
        self.report("loading the model", 0.5)
        match self.config.behaviour:
            case "fault":
                raise EnvironmentFault("no room on the disk", remedy="Make room")
            case "bug":
                raise ZeroDivisionError("a bug")
            case "hang":
                await asyncio.Event().wait()
            case "thread":
                await asyncio.to_thread(threading.Event().wait)
            case "leave":
                self.leave()
            case "crash":
                self.spawn(self._crash(), "crasher")

    async def _crash(self) -> None:
        raise ZeroDivisionError("a bug in a task")

    async def drain(self) -> None:
        self.calls.append("drain")
        if self.config.behaviour == "slow_drain":
            await asyncio.Event().wait()

    async def stop(self) -> None:
        self.calls.append("stop")
        self.telemetry.span("stop", traceparent=self.traceparent, start_ns=1, end_ns=2)

    async def lease_lost(self) -> None:
        self.calls.append("lease_lost")
        self.take_new_instance()

    def detail(self) -> str:
        return "at your service"


if __name__ == "__main__":
    main(ProbeService, ProbeConfig)
