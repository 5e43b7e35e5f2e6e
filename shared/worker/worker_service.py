"""What a prefill and a decode worker have in common as services: an engine in a thread of its own, a place in the cache, an intake."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from shared.attempts import Attempts
from shared.bus.base import Bus, Delivery, Message, Subscription
from shared.config import ServiceConfig
from shared.engine import load
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine
from shared.errors import BusClosed, BusError, RequestError
from shared.kernels import absent
from shared.kv.block_pool import BlockPool
from shared.messages.codec import encode
from shared.messages.fleet import DrainReply, EndedRequest, WorkerLease, WorkerLoad
from shared.messages.request import Cancel, DecodeTask, GenerateRequest, PrefillTask
from shared.messages.session import Finish, HeldRequest
from shared.service import Service
from shared.telemetry import Telemetry
from shared.telemetry.logs import concern
from shared.types import InstanceId
from shared.worker.chain import Chain
from shared.worker.check import fault_of
from shared.worker.engine_thread import EngineThread
from shared.worker.finish import send_finish
from shared.worker.intake import Intake, acknowledge, keep_in_progress
from shared.worker.load_report import Ended, report_load
from shared.worker.presence import Presence
from shared.worker.progress import report_progress

R = TypeVar("R")

APPEAR_AGAIN_S = 1.0

log = logging.getLogger(__name__)


class HeldJob(Protocol):
    """One attempt of a request, as a worker holds it."""

    delivery: Delivery
    is_cancelled: bool

    @property
    def request(self) -> GenerateRequest: ...

    def abandon(self, fate: str = "cancelled") -> None:
        """Nobody wants it any more: mark it cancelled, for the reason `fate`, and break off what is under way for it beside the loop."""
        ...

    def held(self) -> HeldRequest:
        """For Progress."""
        ...


J = TypeVar("J", bound=HeldJob)
T = TypeVar("T", PrefillTask, DecodeTask)


class WorkerService(Service, Generic[J, T]):
    """A worker's life: load the engine, announce itself, take tasks into `self.held`'s jobs, run the loop.

    Subclasses build their scheduler in `prepare`, start jobs in `begin`, loop in `run`, and call `forget` when a job is over here.
    """

    def __init__(
        self,
        role: Literal["prefill", "decode"],
        task_type: type[T],
        config: ServiceConfig,
        engine: EngineConfig,
        kv_dir: Path | None,
        bus: Bus,
        telemetry: Telemetry,
        instance: InstanceId,
    ) -> None:
        super().__init__(config, bus, telemetry, instance)
        self.attempts = Attempts(bus, self.subjects, telemetry, time.monotonic)
        self.kv_dir = kv_dir
        self.wake = asyncio.Event()
        """Set by whatever may give the loop something to do."""
        self._worker_role: Literal["prefill", "decode"] = role
        self._engine_config = engine
        self._engine: Engine | None = None
        self._presence: Presence | None = None
        self._engine_thread = EngineThread()
        self._reports = Ended()
        self._idle = asyncio.Event()
        self._verbs: list[Subscription] = []
        self._intake: Intake[T] = Intake(bus, self.subjects, telemetry, self.attempts, role, task_type, self._take, self._dropped)

    # -- what a subclass says ------------------------------------------------------------------------------------------------
    @abstractmethod
    def prepare(self, pool: BlockPool) -> None:
        """The engine is loaded: build what works on its pool."""

    @abstractmethod
    def begin(self, task: T, delivery: Delivery, chain: Chain | None) -> None:
        """A task that is not held yet. `chain` None: it is of another model digest, and is computed without reuse."""

    @abstractmethod
    async def run(self) -> None:
        """The loop, for ever."""

    @abstractmethod
    def jobs(self) -> Sequence[J]:
        """Everything held, to the last moment."""

    @abstractmethod
    def load(self, sequence: int, ended: list[EndedRequest]) -> WorkerLoad:
        """The next load report."""

    async def serve_verbs(self) -> list[Subscription]:
        """Answer the worker's own verbs, under the current instance."""
        return []

    # -- life ----------------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        self.report("loading the model")
        self._engine = await self.in_engine(load, self._engine_config, self.report)
        self.report("warming up")
        await self.in_engine(self._engine.warm_up, self.report)
        for kernel in sorted(absent):
            self.telemetry.count("worker_without_kernel", kernel=kernel)
        pool = BlockPool(self._engine.spec.num_blocks)
        self.prepare(pool)
        self._presence = Presence(self, self._engine, pool, self.kv_dir, self.wake.set)
        await self._appear()
        self.spawn(self.attempts.follow(self._on_cancel), "cancels")
        self.fleet.on_change(self._on_lease)
        self.spawn(self.run(), "loop")
        self.spawn(report_progress(self.bus, self.subjects, lambda: self.instance, self._worker_role, self._progress), "progress")
        self.spawn(keep_in_progress(lambda: [job.delivery for job in self.jobs()]), "in-progress")
        self.spawn(report_load(self.bus, self.subjects, self._reports, self.load), "load")

    async def _appear(self) -> None:
        await self.presence.open()
        self._verbs = [await self.bus.serve(self.subjects.worker(self.instance, "drain"), self._on_drain), *await self.serve_verbs()]
        await self._intake.open(self.instance, self.spawn)

    async def _disappear(self) -> None:
        """Take no more, let go of everything held, answer no more. What is let go of is the gateways' to submit again."""
        self._intake.shut()
        for job in self.jobs():
            job.abandon()
        self.wake.set()
        await self._until_idle()
        await self._intake.close()
        verbs, self._verbs = self._verbs, []
        for verb in verbs:
            await verb.close()
        await self.presence.close()

    async def _until_idle(self) -> None:
        while self.jobs():
            self._idle.clear()
            await self._idle.wait()

    async def drain(self) -> None:
        """Finish what is here; what comes meanwhile (it was routed before the lease said draining) is finished too."""
        await self._until_idle()

    async def stop(self) -> None:
        """Whatever is left goes back: its gateways see the lease end and submit it again."""
        await self._disappear()
        await asyncio.get_running_loop().run_in_executor(None, self._engine_thread.shut)
        self.engine.close()

    async def lease_lost(self) -> None:
        """Drop everything: the gateways have moved it on. Come back as somebody else."""
        self.telemetry.count("worker_reborn")
        await self._disappear()
        self.take_new_instance()
        while True:
            try:
                return await self._appear()
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the worker cannot come back yet: %s", error)
                await self._disappear()
                await asyncio.sleep(APPEAR_AGAIN_S)

    def describe(self) -> WorkerLease:
        lease = super().describe()
        return self._presence.describe(lease) if self._presence is not None else lease

    @property
    def engine(self) -> Engine:
        """There from `prepare` on."""
        assert self._engine is not None
        return self._engine

    @property
    def presence(self) -> Presence:
        assert self._presence is not None
        return self._presence

    async def in_engine(self, work: Callable[..., R], *arguments: Any) -> R:
        """Run `work` in the engine's thread."""
        return await self._engine_thread.run(work, *arguments)

    # -- tasks ---------------------------------------------------------------------------------------------------------------
    def _take(self, task: T, delivery: Delivery) -> None:
        request: GenerateRequest = task.request
        for job in self.jobs():
            if job.request.request_id == request.request_id and job.request.epoch == request.epoch:
                job.delivery = delivery  # redelivered while we hold it: this is the one to ack
                return
        fault = fault_of(request, self.engine.spec)
        if fault is not None:
            self.spawn(self._refuse(request, fault, delivery), "refuse")
            return
        self.begin(task, delivery, self._chain(request))
        self.wake.set()

    def _chain(self, request: GenerateRequest) -> Chain | None:
        spec = self.engine.spec
        if request.model != spec.model_digest.hex()[:16]:
            self.telemetry.count("other_model_tasks")
            return None
        return Chain(spec.model_digest, request, spec.layout.block_size, self.presence.public_prefixes)

    async def _refuse(self, request: GenerateRequest, fault: RequestError, delivery: Delivery) -> None:
        """A task that no worker could work on ends here, whatever the gateway thought of it."""
        concern(request.request_id, request.traceparent)
        self.telemetry.count("malformed_messages", kind=self._worker_role)
        log.warning("task %s is refused: %s", request.msg_id, fault.message)
        finish = Finish(request.request_id, request.epoch, self.instance, error_code=fault.code, error_message=fault.message)
        await send_finish(self.bus, self.subjects, self.fleet, self.telemetry, request.gateway, finish)
        self._dropped(request)
        await acknowledge(delivery)

    async def _on_drain(self, message: Message) -> bytes:
        """Finish what is here, and end the process."""
        self.leave()
        return encode(DrainReply(len(self.jobs())))

    def _dropped(self, request: GenerateRequest) -> None:
        """Nobody wants it: the routers need not keep it booked."""
        self._reports.add(request.request_id, request.epoch)

    def _on_cancel(self, cancel: Cancel) -> None:
        for job in self.jobs():
            request = job.request
            if request.request_id == cancel.request_id and self.attempts.is_cancelled(request.request_id, request.epoch, self.instance):
                job.abandon()
                self.wake.set()

    def _on_lease(self, lease: WorkerLease, is_alive: bool) -> None:
        """A gateway is gone, and its clients' connections with it: nobody waits for its requests any more."""
        if lease.role != "gateway" or is_alive:
            return
        for job in self.jobs():
            if job.request.gateway == lease.instance:
                job.abandon("gateway_gone")
                self.wake.set()

    async def forget(self, job: J) -> None:
        """The job is over here and out of `jobs`: ack, and tell the routers with the next load report."""
        self._reports.add(job.request.request_id, job.request.epoch)
        if not self.jobs():
            self._idle.set()
        await acknowledge(job.delivery)

    def _progress(self) -> Iterable[tuple[InstanceId, HeldRequest]]:
        return [(job.request.gateway, job.held()) for job in self.jobs() if not job.is_cancelled]
