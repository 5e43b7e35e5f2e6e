"""A prefill worker's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from services.prefill.config import PrefillConfig
from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from shared.attempts import Attempts
from shared.bus.base import Bus, Delivery
from shared.engine import load
from shared.engine.batch import Batch
from shared.engine.engine import Engine
from shared.errors import BusClosed, BusError
from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.messages.codec import encode
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.request import Cancel, DecodeTask, GenerateRequest, PrefillTask
from shared.messages.session import HeldRequest
from shared.service import Service
from shared.telemetry import Telemetry
from shared.types import InstanceId
from shared.worker.chain import Chain
from shared.worker.intake import Intake, acknowledge, keep_in_progress
from shared.worker.load_report import Ended, report_load
from shared.worker.presence import Presence
from shared.worker.progress import report_progress

log = logging.getLogger(__name__)


class PrefillService(Service):
    """The loop is `admit · schedule · forward · commit`; each chunk goes into the store while the next one computes."""

    role = "prefill"

    def __init__(self, config: PrefillConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self.attempts = Attempts(bus, self.subjects, telemetry, time.monotonic)
        self._reports = Ended()
        self._intake = Intake(bus, self.subjects, telemetry, self.attempts, "prefill", PrefillTask, self._take, self._dropped)
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._ready: list[Job] = []
        """Placed and loaded, in order: these compute."""
        self._handing_over: dict[str, Job] = {}
        self._engine: Engine | None = None
        self._scheduler: PrefillScheduler | None = None
        self._presence: Presence | None = None

    # -- life ------------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.report("loading the model")
        self._engine = await loop.run_in_executor(self._engine_thread, load, self.config.engine, self.report)
        self.report("warming up")
        await loop.run_in_executor(self._engine_thread, self._engine.warm_up, self.report)
        spec, config = self.engine.spec, self.config
        self._scheduler = PrefillScheduler(BlockPool(spec.num_blocks), spec.layout.block_size, config.chunk_tokens, config.chunk_ms)
        self._presence = Presence(self, self.engine, self.scheduler.pool, config.kv_dir)
        await self._presence.open()
        await self._intake.open(self.instance, self.spawn)
        self.spawn(self.attempts.follow(self._on_cancel), "cancels")
        self.spawn(self._run(), "prefill-loop")
        self.spawn(report_progress(self.bus, self.subjects, lambda: self.instance, "prefill", self._held), "progress")
        self.spawn(keep_in_progress(self._deliveries), "in-progress")
        self.spawn(report_load(self.bus, self.subjects, self._reports, self._load), "load")

    async def drain(self) -> None:
        """Finish what is here."""
        while self.scheduler.jobs or self._handing_over:
            self._idle.clear()
            await self._idle.wait()

    async def stop(self) -> None:
        """What is left is not acked: its gateways see the lease end and submit it again."""
        await self._intake.close()
        if self._presence is not None:
            await self._presence.close()
        await asyncio.get_running_loop().run_in_executor(None, self._engine_thread.shutdown)
        if self._engine is not None:
            self._engine.close()

    async def lease_lost(self) -> None:
        """Drop everything: the gateways have moved it on. Come back as somebody else."""
        self.telemetry.count("worker_reborn")
        await self._intake.close()
        for job in list(self.scheduler.jobs.values()):
            job.is_cancelled = True
        self._wake.set()
        self.take_new_instance()
        await self.presence.reopen()
        await self._intake.open(self.instance, self.spawn)

    def describe(self) -> WorkerLease:
        lease = super().describe()
        if self._engine is None or self._presence is None:
            return lease
        return msgspec.structs.replace(self._presence.describe(lease), prefill_budget=self.scheduler.chunk_tokens)

    def detail(self) -> str:
        spec = self.engine.spec
        return f"{spec.model_name} {spec.dtype} · {spec.num_blocks} blocks"

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def scheduler(self) -> PrefillScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def presence(self) -> Presence:
        assert self._presence is not None
        return self._presence

    # -- the loop --------------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            self._wake.clear()
            await self._admit()
            batch = self.scheduler.schedule(self._ready)
            if batch is None:
                await self._wake.wait()
                continue
            step_ms = await self._forward(batch)
            self._commit(batch, step_ms)

    async def _admit(self) -> None:
        """Let go of what was cancelled, hand over what is complete, place and load what waits."""
        for job in [job for job in self._ready if job.is_cancelled or job.num_left_tokens == 0]:
            self._ready.remove(job)
            self._leave(job)
        for job in [job for job in self.scheduler.jobs.values() if not job.is_placed]:
            if job.is_cancelled or job.num_target_tokens == 0 or not self.scheduler.fits(job):
                job.num_target_tokens = 0
                self._leave(job)
            elif self.scheduler.place(job):
                self.spawn(self._load_prefix(job), "load")
            else:
                break

    async def _forward(self, batch: Batch) -> float | None:
        """Milliseconds of the chunk; None: it failed, and decode computes what is missing."""
        started = time.monotonic()
        try:
            await asyncio.get_running_loop().run_in_executor(self._engine_thread, self.engine.forward, batch)
        except Exception:  # whatever a forward raises is this batch's fate and not the process's
            log.exception("a chunk of %d tokens failed", batch.num_tokens)
            self.telemetry.count("engine_errors")
            return None
        elapsed_s = time.monotonic() - started
        self.telemetry.observe("prefill_chunk_seconds", elapsed_s)
        self.telemetry.count("prefill_computed_tokens", batch.num_tokens)
        return elapsed_s * 1000

    def _commit(self, batch: Batch, step_ms: float | None) -> None:
        """Cache the chunk's blocks, and give them to the store while the next chunk computes."""
        if step_ms is None:
            for item in batch.items:
                job = self.scheduler.jobs[item.sequence.key]
                job.num_target_tokens = job.sequence.num_computed_tokens
            return
        for job, start, end in self.scheduler.commit(batch, step_ms):
            self._store(job, start, end)

    # -- what runs beside the loop -----------------------------------------------------------------------------------------
    async def _load_prefix(self, job: Job) -> None:
        """What the store has and the pool has not; then the job may compute. Blocks found in the pool are given to the store too: it may
        have evicted them, and the decode worker needs them there."""
        sequence, size = job.sequence, self.scheduler.block_size
        first = sequence.num_computed_tokens // size
        end = job.num_target_tokens // size
        if first < end and job.chain is not None and job.task.may_be_held:
            packed = job.request.token_ids[4 * size * first : 4 * size * end]
            result = await self.presence.kv.load(
                job.chain.hashes[first:end], packed, sequence.block_table[first:end], request_id=job.request.request_id
            )
            self.scheduler.loaded(job, result.num_blocks)
        self.telemetry.count("prefill_cached_tokens", job.num_cached_tokens)
        if job.num_cached_tokens:
            self._store(job, 0, job.num_cached_tokens // size)
        self._ready.append(job)
        self._wake.set()

    def _store(self, job: Job, start: int, end: int) -> None:
        if self.config.kv_dir is not None and self.engine.spec.commits_blocks:
            blocks = job.blocks(start, end, self.scheduler.block_size)
            previous = job.stores[-1] if job.stores else None
            job.stores.append(asyncio.create_task(self._store_after(previous, blocks, job)))

    async def _store_after(self, previous: asyncio.Task[int] | None, blocks: list[BlockToStore], job: Job) -> int:
        """Chunks are stored in order: a block without its parents would be found by nobody."""
        if previous is not None:
            await asyncio.wait([previous])
        result = await self.presence.kv.store(blocks, handoff_host=job.task.decode_host, request_id=job.request.request_id)
        if result.reason:
            self.telemetry.count("prefill_store_faults", reason=result.reason)
        return result.num_stored + result.num_present

    def _leave(self, job: Job) -> None:
        """The job computes no more: out of the scheduler when its blocks are stored, and on to decode."""
        self.scheduler.jobs.pop(job.sequence.key, None)
        self._handing_over[job.sequence.key] = job
        self.spawn(self._hand_over(job), "hand-over")

    async def _hand_over(self, job: Job) -> None:
        counts = await asyncio.gather(*job.stores) if job.stores else []
        self.scheduler.remove(job)
        self._wake.set()
        outcome = "cancelled" if job.is_cancelled else await self._send_on(job, sum(counts))
        self._handing_over.pop(job.sequence.key, None)
        self.telemetry.count("prefill_tasks", outcome=outcome)
        self._reports.add(job.request.request_id, job.request.epoch)
        await acknowledge(job.delivery)
        if not self.scheduler.jobs and not self._handing_over:
            self._idle.set()

    async def _send_on(self, job: Job, num_found_blocks: int) -> str:
        """The DecodeTask. If it cannot be queued, the gateway hears no more Progress and submits the request again."""
        held_ms = (time.monotonic() - job.taken_s) * 1000
        request = msgspec.structs.replace(job.request, deadline_ms=max(int(job.request.deadline_ms - held_ms), 0))
        task = DecodeTask(
            request=request,
            router=job.task.router,
            decode_worker=job.task.decode_worker,
            prefill_worker=self.instance,
            num_prefilled_tokens=min(num_found_blocks * self.scheduler.block_size, job.sequence.num_computed_tokens),
            num_cached_tokens=job.num_cached_tokens,
            queue_ms=job.task.queue_ms,
            prefill_ms=held_ms,
        )
        self._record(job, held_ms)
        subject, msg_id = self.subjects.decode(job.task.decode_worker), f"{request.msg_id}:{job.task.decode_worker}"
        try:
            await self.bus.enqueue(subject, encode(task), msg_id=msg_id)
        except BusClosed:
            raise
        except BusError as error:
            log.warning("a decode task could not be queued: %s", error)
            return error.code
        return "handed_over"

    def _record(self, job: Job, held_ms: float) -> None:
        end_ns = self.telemetry.now_ns()
        self.telemetry.span(
            "prefill compute",
            traceparent=job.request.traceparent,
            start_ns=end_ns - int(held_ms * 1e6),
            end_ns=end_ns,
            num_cached_tokens=job.num_cached_tokens,
            num_computed_tokens=job.sequence.num_computed_tokens - job.num_cached_tokens,
            worker=self.instance,
        )

    # -- messages --------------------------------------------------------------------------------------------------------
    def _take(self, task: PrefillTask, delivery: Delivery) -> None:
        request, spec = task.request, self.engine.spec
        key = f"{request.request_id}:{request.epoch}"
        held = self.scheduler.jobs.get(key) or self._handing_over.get(key)
        if held is not None:
            held.delivery = delivery  # redelivered while we hold it: this is the one to ack
            return
        is_same_model = request.model == spec.model_digest.hex()[:16]
        if not is_same_model:
            self.telemetry.count("other_model_tasks")
        chain = Chain(spec.model_digest, request, spec.layout.block_size, ()) if is_same_model and self.config.kv_dir else None
        self.scheduler.add(Job(task, delivery, chain, spec.layout.block_size, time.monotonic()))
        self._wake.set()

    def _dropped(self, request: GenerateRequest) -> None:
        """Nobody wants it: the routers need not keep it booked."""
        self._reports.add(request.request_id, request.epoch)

    def _on_cancel(self, cancel: Cancel) -> None:
        for job in [*self.scheduler.jobs.values(), *self._handing_over.values()]:
            request = job.request
            if request.request_id == cancel.request_id and self.attempts.is_cancelled(request.request_id, request.epoch, self.instance):
                job.is_cancelled = True
                self._wake.set()

    # -- reports ---------------------------------------------------------------------------------------------------------
    def _all(self) -> list[Job]:
        return [*self.scheduler.jobs.values(), *self._handing_over.values()]

    def _held(self) -> Iterable[tuple[InstanceId, HeldRequest]]:
        return [(job.request.gateway, job.held()) for job in self._all() if not job.is_cancelled]

    def _deliveries(self) -> Iterable[Delivery]:
        return [job.delivery for job in self._all()]

    def _load(self, sequence: int, ended: list[EndedRequest]) -> WorkerLoad:
        scheduler, spec = self.scheduler, self.engine.spec
        self.telemetry.gauge("prefill_tasks_held", len(self._all()))
        self.telemetry.gauge("device_used_blocks", scheduler.pool.num_used)
        return WorkerLoad(
            worker=self.instance,
            role="prefill",
            model=spec.model_digest.hex()[:16],
            sequence=sequence,
            num_running=len(self._ready),
            num_waiting=len(scheduler.jobs) - len(self._ready),
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=spec.num_blocks,
            num_used_blocks=scheduler.pool.num_used,
            step_ms=scheduler.chunk_ms.value,
            prefill_tokens_per_s=scheduler.tokens_per_s.value,
            ended=ended,
        )
