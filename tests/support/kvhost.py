"""One machine of a test: a folder on tmpfs, its store as a service, and clients of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.kvstore.config import KvStoreConfig
from services.kvstore.service import KvStoreService
from shared.kvclient import KvClient
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.kvstore import LAYOUT, MODEL, Pool
from tests.support.local_bus import LocalBus

SUBJECTS = Subjects()


class Host:
    """One machine: a folder on tmpfs, its store, and clients."""

    def __init__(self, bus: LocalBus, root: Path, name: str, secret: Path | None = None) -> None:
        self.bus: Any = bus
        self.directory = root / name
        self.config = KvStoreConfig(kv_dir=self.directory, kv_dram=2**21, cluster_secret_file=secret)
        self.telemetry = NullTelemetry()
        self.clients: list[KvClient] = []
        self.service: KvStoreService

    async def start(self) -> None:
        self.service = KvStoreService(self.config, self.bus, self.telemetry, "00000001")
        await self.service.start()

    async def kill(self) -> None:
        """As kill -9: the process is gone, the file stays as it is."""
        for subscription in self.service._subscriptions:
            await subscription.close()
        await self.service.cancel_tasks()
        for tier in self.service.store.lower:
            tier._slab.close()  # type: ignore[attr-defined]
            tier._journal.close()  # type: ignore[attr-defined]
        assert self.service._lock is not None
        self.service._lock.close()

    async def client(self, pool: Pool, instance: str = "aaaaaaaa") -> KvClient:
        made = KvClient(self.bus, SUBJECTS, self.telemetry, instance, self.directory, LAYOUT, MODEL, pool)
        await made.open()
        self.clients.append(made)
        return made

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.service.stop()

    def count(self, name: str) -> float:
        return sum(value for (counted, _), value in self.telemetry.counts.items() if counted == name)
