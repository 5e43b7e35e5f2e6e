"""The services of one stack inside the test's process, on the simulated engine: for races that need a hand on the messages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from services.decode.config import DecodeConfig
from services.decode.service import DecodeService
from services.gateway.admission import Client
from services.gateway.config import GatewayConfig
from services.gateway.openai import CompletionBody
from services.gateway.service import GatewayService
from services.gateway.sessions import Stream
from services.prefill.config import PrefillConfig
from services.prefill.service import PrefillService
from services.router.config import Disaggregation, RouterConfig
from services.router.service import RouterService
from shared.bus.base import Bus
from shared.config import ServiceConfig
from shared.engine.config import EngineConfig
from shared.messages.request import GenerateRequest
from shared.service import Service, mint_instance, run_service
from shared.telemetry import NullTelemetry
from tests.support.model_fixture import MODEL

MakeBus = Callable[[], Awaitable[Bus]]


class Cluster:
    """Start what the test needs; everything ends with the `async with`."""

    def __init__(self, make_bus: MakeBus, namespace: str, folder: Path, sim_profile: str = "a=0", **gateway: Any) -> None:
        self._make_bus = make_bus
        self._folder = folder
        self._service = ServiceConfig(namespace=namespace, drain_s=5.0)
        self._engine = EngineConfig(model=MODEL, device="sim", sim_profile=sim_profile, kv_device=2**20)
        self._gateway = gateway
        """More settings of the gateway."""
        self._stack = contextlib.AsyncExitStack()
        self.gateway: GatewayService

    async def __aenter__(self) -> Cluster:
        config = GatewayConfig(service=self._service, http_port=0, cluster_secret_file=self._folder / "secret", **self._gateway)
        self.gateway = await self._run(GatewayService, config)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def router(self, disaggregation: Disaggregation = "auto") -> RouterService:
        return await self._run(RouterService, RouterConfig(service=self._service, disaggregation=disaggregation))

    async def decode(self, **settings: Any) -> DecodeService:
        return await self._run(DecodeService, DecodeConfig(service=self._service, engine=self._engine, **settings))

    async def prefill(self, **settings: Any) -> PrefillService:
        return await self._run(PrefillService, PrefillConfig(service=self._service, engine=self._engine, **settings))

    async def _run(self, kind: type[Any], config: Any) -> Any:
        service: Service = kind(config, await self._make_bus(), NullTelemetry(), mint_instance())
        return await self._stack.enter_async_context(run_service(service))

    async def served(self) -> None:
        """Until the gateway knows a model with a worker, and a router."""
        while not (self.gateway.models.served() and self.gateway.fleet.workers("router")):
            self.gateway.models.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self.gateway.models.changed.wait()

    async def request(self, prompt: list[int], max_tokens: int, **fields: Any) -> GenerateRequest:
        """A request as the front doors make it, not submitted."""
        body = CompletionBody(model=MODEL, prompt=list(prompt), max_tokens=max_tokens, temperature=0, ignore_eos=True, **fields)
        admitted = await self.gateway.desk.admission.completion(body, Client("local", ""))
        return admitted.requests[0]

    async def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The whole output."""
        stream = await self.gateway.sessions.open(await self.request(prompt, max_tokens))
        return await finished(self.gateway, stream)


async def finished(gateway: GatewayService, stream: Stream) -> list[int]:
    """Read a stream to its end; an error is raised."""
    while await stream.next():
        pass
    gateway.sessions.close(stream)
    end = stream.session.end
    assert end is not None
    if end.error is not None:
        raise end.error
    return stream.session.output
