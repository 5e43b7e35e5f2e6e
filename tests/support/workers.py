"""Workers on the simulated engine inside the test's process, and a store if wanted."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from pathlib import Path
from typing import Any

import msgspec

from services.decode.config import DecodeConfig
from services.decode.service import DecodeService
from services.kvstore.config import KvStoreConfig
from services.kvstore.service import KvStoreService
from services.prefill.config import PrefillConfig
from services.prefill.service import PrefillService
from shared.config import ServiceConfig
from shared.engine.config import EngineConfig
from shared.messages.codec import encode
from shared.messages.request import DecodeTask, GenerateRequest, PrefillTask
from shared.messages.subjects import Subjects
from shared.service import Service, mint_instance, run_service
from shared.telemetry import NullTelemetry
from shared.types import SamplingParams, pack_tokens
from tests.support.cluster import MakeBus
from tests.support.model_fixture import MODEL
from tests.support.played_gateway import PlayedGateway

ROUTER = "0" * 8


class Workers:
    """Start what the test needs; everything ends with the `async with`."""

    def __init__(
        self, make_bus: MakeBus, namespace: str, kv_dir: Path | None = None, sim_profile: str = "a=0", drain_s: float = 5.0
    ) -> None:
        self._make_bus = make_bus
        self._service = ServiceConfig(namespace=namespace, drain_s=drain_s)
        self.kv_dir = kv_dir
        self.engine = EngineConfig(model=MODEL, device="sim", sim_profile=sim_profile, kv_device=2**20)
        self._stack = contextlib.AsyncExitStack()
        self._numbers = itertools.count(1)
        self.subjects = Subjects(namespace)
        self.gateway: PlayedGateway

    async def __aenter__(self) -> Workers:
        self.gateway = PlayedGateway(await self._make_bus(), self.subjects)
        await self.gateway.open()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()
        await self.gateway.close()

    async def decode(self, **settings: Any) -> DecodeService:
        config = DecodeConfig(service=self._service, kv_dir=self.kv_dir, **({"engine": self.engine} | settings))
        return await self.run(DecodeService, config)

    async def prefill(self, **settings: Any) -> PrefillService:
        config = PrefillConfig(service=self._service, kv_dir=self.kv_dir, **({"engine": self.engine} | settings))
        return await self.run(PrefillService, config)

    async def store(self, **settings: Any) -> KvStoreService:
        return await self.run(KvStoreService, KvStoreConfig(service=self._service, kv_dir=self.kv_dir, kv_dram=2**22, **settings))

    async def run(self, kind: type[Any], config: Any) -> Any:
        service: Service = kind(config, await self._make_bus(), NullTelemetry(), mint_instance())
        await self._stack.enter_async_context(run_service(service))
        return service

    def request(self, worker: DecodeService | PrefillService, prompt: list[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
        """A request as a gateway publishes it, for a worker's model."""
        sampling = {"temperature": 0.0, "ignore_eos": True} | fields.pop("sampling", {})
        request = GenerateRequest(
            request_id=hashlib.md5(f"{next(self._numbers)}".encode()).hexdigest(),
            epoch=0,
            gateway=self.gateway.instance,
            model=worker.engine.spec.model_digest.hex()[:16],
            request_class="normal",
            token_ids=pack_tokens(prompt),
            num_emitted=0,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            salt=bytes(32),
            partition="0" * 16,
            block_keys=b"",
            deadline_ms=60_000,
            sent_at_ns=time.time_ns(),
        )
        return msgspec.structs.replace(request, **fields)

    async def to_decode(self, worker: DecodeService, request: GenerateRequest, msg_id: str = "", **fields: Any) -> GenerateRequest:
        """Queue the request's task at a decode worker."""
        task = DecodeTask(request, ROUTER, worker.instance, **fields)
        await self.gateway.bus.enqueue(self.subjects.decode(worker.instance), encode(task), msg_id=msg_id or request.msg_id)
        return request

    async def to_prefill(
        self, worker: PrefillService, decode_worker: DecodeService, request: GenerateRequest, **fields: Any
    ) -> GenerateRequest:
        """Queue the request's task at a prefill worker, for a decode worker."""
        fields = {"decode_host": decode_worker.presence.kv.host} | fields
        task = PrefillTask(request, ROUTER, worker.instance, decode_worker.instance, **fields)
        await self.gateway.bus.enqueue(self.subjects.prefill(worker.instance), encode(task), msg_id=request.msg_id)
        return request

    async def generate(self, worker: DecodeService, prompt: list[int], max_tokens: int = 8, **fields: Any) -> list[int]:
        """The output of a new request, by one decode worker alone."""
        request = await self.to_decode(worker, self.request(worker, prompt, max_tokens, **fields))
        return await self.gateway.finished(request)


def counted(service: Service, name: str, **labels: str) -> float:
    """A counter of a worker."""
    assert isinstance(service.telemetry, NullTelemetry)
    return service.telemetry.total(name, **labels)


def is_idle(worker: DecodeService | PrefillService) -> bool:
    """Nothing is held, and every block is free."""
    pool = worker.scheduler.pool
    pool.check_integrity()
    return not worker.jobs() and pool.num_used == 0
