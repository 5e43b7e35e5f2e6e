"""What a service is: six methods around a bus."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

from shared.bus.base import Bus
from shared.bus.discovery import Endpoint
from shared.config import ServiceConfig
from shared.fleet import Fleet
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.tasks import cancel_all
from shared.telemetry import Telemetry
from shared.types import InstanceId, Role

log = logging.getLogger(__name__)


def mint_instance() -> InstanceId:
    """A new process start's id."""
    return secrets.token_hex(4)


class Service(ABC):
    """One of the six. `shared.service.run_service` and `main` take it through its life:

    1. The bus is connected and streams and buckets exist before anything of the service runs.
    2. Its lease says `starting`, and `fleet` is filled, before `start()` is called.
    3. The lease says `ready` only after `start()` returned; then the service is advertised, then the supervisor is told.
    4. The lease is renewed every second. If it expired while the process lived (it was stopped, or cut off alone), `lease_lost()` is
       awaited, and the lease goes on under what `instance` is then.
    5. At SIGTERM or SIGINT, or after `leave()`: advertisement withdrawn, lease `draining`, `drain()` for at most `drain_s`, `stop()`,
       spawned tasks cancelled,
       lease deleted, telemetry flushed (2 s at most), bus closed, exit 0. A second signal exits with 130 at once.
    6. A spawned task that fails ends the process: its traceback is logged, the lease is deleted, the exit code is the error's own
       (1; 70 when the bus is closed for good).
    7. An error of shared.errors at the start is one log line with its remedy, and no traceback; exit 1, 2 (setting) or 3 (environment).
       After a failed `start()` neither `drain()` nor `stop()` is called.

    `self.config` is the subclass's: its own frozen struct, of which `service_config` is one part.
    """

    role: ClassVar[Role]

    def __init__(self, config: ServiceConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        self.service_config = config
        self.bus = bus
        self.telemetry = telemetry
        self.instance = instance
        self.subjects = Subjects(config.namespace)
        self.fleet = Fleet(bus, self.subjects, telemetry)
        self.started_at_ns = time.time_ns()
        self.crash: BaseException | None = None
        """The error of the first spawned task that failed."""
        self.crashed = asyncio.Event()
        self.leaving = asyncio.Event()
        """Somebody asked the process to drain and end (`leave`)."""
        self.on_report: Callable[[str, float | None], None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def name(self) -> str:
        """What people call the process."""
        return self.service_config.name or self.role

    @abstractmethod
    async def start(self) -> None:
        """Load, subscribe, spawn. When it returns, the service takes work."""

    async def drain(self) -> None:  # noqa: B027  # nothing to finish by default
        """Take no more; finish or hand back what is held. Cancelled after `drain_s`."""

    async def stop(self) -> None:  # noqa: B027  # nothing to release by default
        """Release what `start` took. Called once, after `drain`, with the spawned tasks still running."""

    async def lease_lost(self) -> None:  # noqa: B027  # a process that owns no work lives on as it is
        """Others hold this process for dead. Workers drop their work here and come back under `take_new_instance()`."""

    def describe(self) -> WorkerLease:
        """The lease. Services add their own fields: `msgspec.structs.replace(super().describe(), model=...)`.

        State and sequence are filled in by whoever keeps the lease. Called at every renewal: it must not wait.
        """
        return WorkerLease(
            instance=self.instance,
            role=self.role,
            name=self.name,
            state="starting",
            sequence=0,
            version=VERSION,
            started_at_ns=self.started_at_ns,
            metrics_address=self.telemetry.address,
            pid=os.getpid(),
        )

    def detail(self) -> str:
        """A few words for people once it is ready: a URL, a model."""
        return ""

    def endpoints(self) -> Sequence[Endpoint]:
        """Subjects that NATS discovery shows of this service: what any client may ask."""
        return ()

    def endpoint_stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Numbers for `$SRV.STATS`, by endpoint name (see `shared.bus.discovery.Stats`)."""
        return {}

    def report(self, text: str, fraction: float | None = None) -> None:
        """Say what the start is busy with, and how much of it is done (0 to 1). From any thread."""
        if self.on_report is not None:
            self.on_report(text, fraction)

    def take_new_instance(self) -> InstanceId:
        """Become another instance (see `lease_lost`)."""
        self.instance = mint_instance()
        return self.instance

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside everything else. If it fails, the process ends (guarantee 6); if it returns or is cancelled, it does not."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def cancel_tasks(self) -> None:
        """End everything spawned, and wait for it."""
        await cancel_all(self._tasks)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        self.telemetry.count("task_crashes")
        log.error("task %s failed", task.get_name(), exc_info=error)
        self.fail(error)

    def leave(self) -> None:
        """Drain and end, as at SIGTERM."""
        self.leaving.set()

    def fail(self, error: BaseException) -> None:
        """End the process because of `error` (the first one counts)."""
        if self.crash is None:
            self.crash = error
            self.crashed.set()


VERSION = version("slipstream")
