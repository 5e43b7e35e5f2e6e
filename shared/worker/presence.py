"""What a worker is to the rest of the system besides its work: its card, its place in the KV cache, its part of the lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from shared.bus.base import Subscription
from shared.engine import lower_device
from shared.engine.engine import Engine
from shared.errors import BusClosed, BusError
from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.kvclient import KvClient
from shared.messages.fleet import WorkerLease
from shared.service import Service
from shared.tasks import cancel_all
from shared.worker.card import card_of, publish_card
from shared.worker.device_events import DeviceEvents
from shared.worker.write_back import WriteBack

CARD_EVERY_S = 5.0
STORE_EVERY_S = 0.5

log = logging.getLogger(__name__)


class Presence:
    """Opened under the service's instance, closed before the service takes another one. `freed` is called when blocks of the pool were
    let go of here."""

    def __init__(self, service: Service, engine: Engine, pool: BlockPool, kv_dir: Path | None, freed: Callable[[], None]) -> None:
        self._service = service
        self._engine = engine
        self._pool = pool
        self._kv_dir = kv_dir
        self._freed = freed
        self.public_prefixes: list[list[int]] = []
        """As the model's card declares them."""
        self._tasks: list[asyncio.Task[None]] = []
        self._subscription: Subscription | None = None
        self._kv: KvClient | None = None
        self._write_back: WriteBack | None = None

    @property
    def kv(self) -> KvClient:
        assert self._kv is not None
        return self._kv

    async def open(self) -> None:
        """Map the arena, publish card and events."""
        service, spec = self._service, self._engine.spec
        device, layout = lower_device(self._engine)
        self._kv = KvClient(
            service.bus,
            service.subjects,
            service.telemetry,
            service.instance,
            self._kv_dir,
            layout,
            spec.model_digest,
            device,
            spec.lower_format,
        )
        await self._kv.open()
        self._write_back = WriteBack(self._pool, self._kv, service.telemetry, self._freed)
        model = spec.model_digest.hex()[:16]
        events = DeviceEvents(service.bus, service.subjects, service.instance, model, self._pool)
        await self._publish_card()
        self._subscription = await service.bus.serve(service.subjects.worker(service.instance, "snapshot"), events.snapshot)
        self._tasks = [
            service.spawn(events.follow(), "device-events"),
            service.spawn(self._write_back.follow(), "write-back"),
            service.spawn(self._keep_card(), "card"),
            *([service.spawn(self._find_store(self._kv), "find-store")] if self._kv_dir is not None else []),
        ]

    async def close(self) -> None:
        """Idempotent."""
        tasks, self._tasks = self._tasks, []
        write_back, self._write_back = self._write_back, None
        subscription, self._subscription = self._subscription, None
        await cancel_all(tasks)
        if write_back is not None:
            write_back.abandon()
        if subscription is not None:
            await subscription.close()
        if self._kv is not None:
            await self._kv.close()

    def describe(self, lease: WorkerLease) -> WorkerLease:
        """The lease with the engine's and the arena's fields."""
        spec = self._engine.spec
        return msgspec.structs.replace(
            lease,
            host=self._kv.host if self._kv is not None else None,
            model=spec.model_digest.hex()[:16],
            device=spec.device,
            num_blocks=spec.num_blocks,
            block_size=spec.layout.block_size,
        )

    def write_back(self, blocks: list[BlockToStore]) -> None:
        """Give full blocks to the store, if the weight format is admitted to the numerics class and there is a store."""
        if self._engine.spec.commits_blocks and self._kv_dir is not None and self._write_back is not None:
            self._write_back.add(blocks)

    async def _find_store(self, kv: KvClient) -> None:
        """A store that starts after us must stand in our lease before the first handoff: routers tell prefill where to push."""
        while kv.host is None:
            await asyncio.sleep(STORE_EVERY_S)
            await kv.open()

    async def _keep_card(self) -> None:
        """A wiped bucket gets its card again."""
        while True:
            await asyncio.sleep(CARD_EVERY_S)
            try:
                await self._publish_card()
            except BusClosed:
                raise
            except BusError as error:
                log.info("the model card could not be checked: %s", error)

    async def _publish_card(self) -> None:
        card = await publish_card(self._service.bus, self._service.subjects, card_of(self._engine.spec))
        self.public_prefixes = card.public_prefixes
