"""A prefill worker's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from services.prefill.config import PrefillConfig
from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from shared.bus.base import Bus, Delivery
from shared.engine.batch import Batch
from shared.errors import BusClosed, BusError
from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.messages.codec import encode
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.request import DecodeTask, PrefillTask
from shared.telemetry import Telemetry
from shared.telemetry.conventions import consumed
from shared.telemetry.logs import concern, ids_of
from shared.types import InstanceId
from shared.worker.chain import Chain
from shared.worker.worker_service import WorkerService

MAX_WAIT_MS = 5_000.0
"""The longest wait for blocks that are under way."""

log = logging.getLogger(__name__)


class PrefillService(WorkerService[Job, PrefillTask]):
    """The loop is `admit · schedule · forward · commit`; each chunk goes into the store while the next one computes."""

    role = "prefill"
    scheduler: PrefillScheduler

    def __init__(self, config: PrefillConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__("prefill", PrefillTask, config.service, config.engine, config.kv_dir, bus, telemetry, instance)
        self.config = config
        self._ready: list[Job] = []
        """Placed and loaded, in order: these compute."""
        self._handing_over: dict[str, Job] = {}

    # -- life ------------------------------------------------------------------------------------------------------------
    def prepare(self, pool: BlockPool) -> None:
        self.scheduler = PrefillScheduler(pool, self.engine.spec.layout.block_size, self.config.chunk_tokens, self.config.chunk_ms)

    def jobs(self) -> Sequence[Job]:
        return [*self.scheduler.jobs.values(), *self._handing_over.values()]

    def begin(self, task: PrefillTask, delivery: Delivery, chain: Chain | None) -> None:
        usable = chain if self.kv_dir is not None else None
        job = Job(task, delivery, usable, self.scheduler.block_size, time.monotonic())
        job.traceparent = self.telemetry.begin(task.request.traceparent)
        self.scheduler.add(job)

    def describe(self) -> WorkerLease:
        lease = super().describe()
        return msgspec.structs.replace(lease, prefill_budget=self.scheduler.chunk_tokens) if lease.model else lease

    def detail(self) -> str:
        spec = self.engine.spec
        return f"{spec.model_name} {spec.dtype} · {spec.num_blocks} blocks"

    # -- the loop --------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            self.wake.clear()
            await self._admit()
            batch = self.scheduler.schedule(self._ready)
            if batch is None:
                await self.wake.wait()
                continue
            step_ms = await self._forward(batch)
            self._commit(batch, step_ms)

    async def _admit(self) -> None:
        """Place and load what waits, let go of what was cancelled, hand over what is complete."""
        waiting = [job for job in self.scheduler.jobs.values() if not job.is_placed]
        for job in [job for job in waiting if job.is_cancelled or not self._is_worth_computing(job)]:
            self._leave(job)
        for job in [job for job in waiting if job.sequence.key in self.scheduler.jobs]:
            if not self.scheduler.place(job):
                break
            if self._may_load(job):
                job.beside = self.spawn(self._load_prefix(job), "load")
                job.beside.add_done_callback(partial(self._load_ended, job))
            else:
                self._keep_cached(job)
                self._ready.append(job)
        for job, start, end in self.scheduler.catch_up(self._ready):
            self.telemetry.count("prefill_cached_tokens", (end - start) * self.scheduler.block_size)
            self._store(job, start, end)
        for job in [job for job in self._ready if job.is_cancelled or job.num_left_tokens == 0]:
            self._ready.remove(job)
            self._leave(job)

    def _is_worth_computing(self, job: Job) -> bool:
        """Whether blocks would be left for decode: there is a full one, room for all, and a store at decode's end."""
        return job.num_target_tokens > 0 and self.scheduler.fits(job) and job.task.decode_host is not None

    async def _forward(self, batch: Batch) -> float | None:
        """Milliseconds of the chunk; None: it failed, and decode computes what is missing."""
        started = time.monotonic()
        try:
            await self.in_engine(self.engine.forward, batch)
        except Exception:  # whatever a forward raises is this batch's fate and not the process's
            failed = [self.scheduler.jobs[item.sequence.key].request for item in batch.items]
            ids = ids_of(failed[0].request_id, failed[0].traceparent) if len(failed) == 1 else {}
            log.exception("a chunk of %d tokens failed", batch.num_tokens, extra=ids)
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
                self.scheduler.jobs[item.sequence.key].compute_no_more()
            return
        for job, start, end in self.scheduler.commit(batch, step_ms):
            self._store(job, start, end)

    # -- what runs beside the loop -----------------------------------------------------------------------------------------
    def _may_load(self, job: Job) -> bool:
        """False: the pool has it all, or nobody has the rest. Without a store it is asked for all the same: whether one has come."""
        return job.num_left_tokens > 0 and (job.task.may_be_held or self.presence.kv.host is None)

    async def _load_prefix(self, job: Job) -> None:
        """What the store has and the pool has not."""
        assert job.chain is not None
        sequence, size = job.sequence, self.scheduler.block_size
        first, end = sequence.num_computed_tokens // size, job.num_target_tokens // size
        block_ms = size * self.scheduler.ms_per_token
        result = await self.presence.kv.load(
            job.chain.hashes[first:end],
            job.request.token_ids[4 * size * first : 4 * size * end],
            sequence.block_table[first:end],
            wait_ms=min((end - first) * block_ms, MAX_WAIT_MS),
            traceparent=job.traceparent,
            block_ms=block_ms,
        )
        self.scheduler.loaded(job, result.num_blocks)
        if result.reason == "store_absent":  # nobody could find what is computed here
            self.telemetry.count("prefill_store_faults", reason=result.reason)
            job.compute_no_more()
        else:
            self._keep_cached(job)

    def _load_ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """Also if it was broken off: nothing is copied into the job's blocks any more."""
        job.beside = None
        self._ready.append(job)
        self.wake.set()

    def _keep_cached(self, job: Job) -> None:
        """Blocks found in the pool are given to the store too: it may have evicted them, and the decode worker needs them there."""
        self.telemetry.count("prefill_cached_tokens", job.num_cached_tokens)
        if job.num_cached_tokens:
            self._store(job, 0, job.num_cached_tokens // self.scheduler.block_size)

    def _store(self, job: Job, start: int, end: int) -> None:
        if self.engine.spec.commits_blocks:
            blocks = job.blocks(start, end, self.scheduler.block_size)
            previous = job.stores[-1] if job.stores else None
            job.add_store(self.spawn(self._store_after(previous, blocks, job), "store"))

    async def _store_after(self, previous: asyncio.Task[None] | None, blocks: list[BlockToStore], job: Job) -> None:
        """Chunks are stored in order: a block without its parents would be found by nobody. On this host the last one's blocks count as
        found before the store has said so: decode's acquire waits for its word."""
        if previous is not None:
            await asyncio.wait([previous])
        kv, num_found_before = self.presence.kv, job.num_found_blocks

        def copied() -> None:
            if asyncio.current_task() is job.stores[-1]:
                job.num_found_blocks = num_found_before + len(blocks)
                job.is_copied.set()

        result = await kv.store(
            blocks,
            handoff_host=job.task.decode_host,
            traceparent=job.traceparent,
            copied=copied if job.task.decode_host == kv.host else None,
        )
        if result.reason:
            self.telemetry.count("prefill_store_faults", reason=result.reason)
        if result.reason == "store_absent":
            job.compute_no_more()
        job.num_found_blocks = num_found_before + result.num_stored + result.num_present

    def _leave(self, job: Job) -> None:
        """The job computes no more: out of the scheduler when its blocks are stored, and on to decode."""
        self.scheduler.jobs.pop(job.sequence.key, None)
        self._handing_over[job.sequence.key] = job
        self.spawn(self._hand_over(job), "hand-over")

    async def _hand_over(self, job: Job) -> None:
        if job.stores:
            await job.is_copied.wait()
        self.scheduler.remove(job)
        self.wake.set()
        concern(job.request.request_id, job.request.traceparent)
        if job.is_cancelled:
            self._record(job, job.fate)
        outcome = job.fate if job.is_cancelled else await self._send_on(job)
        self._handing_over.pop(job.sequence.key, None)
        self.telemetry.count("prefill_tasks", outcome=outcome)
        await self.forget(job)

    async def _send_on(self, job: Job) -> str:
        """The DecodeTask. If it cannot be queued, the gateway hears no more Progress and submits the request again."""
        held_ms = (time.monotonic() - job.taken_s) * 1000
        request = msgspec.structs.replace(job.request, deadline_ms=max(int(job.request.deadline_ms - held_ms), 0))
        task = DecodeTask(
            request=request,
            router=job.task.router,
            decode_worker=job.task.decode_worker,
            prefill_worker=self.instance,
            num_prefilled_tokens=min(job.num_found_blocks * self.scheduler.block_size, job.sequence.num_computed_tokens),
            num_cached_tokens=job.num_cached_tokens,
            queue_ms=job.task.queue_ms,
            prefill_ms=held_ms,
        )
        self._record(job, "handed_over")
        subject, msg_id = self.subjects.decode(job.task.decode_worker), f"{request.msg_id}:{job.task.decode_worker}"
        try:
            await self.bus.enqueue(subject, encode(task), msg_id=msg_id)
        except BusClosed:
            raise
        except BusError as error:
            log.warning("a decode task could not be queued: %s", error)
            return error.code
        return "handed_over"

    def _record(self, job: Job, outcome: str) -> None:
        held_ms = (time.monotonic() - job.taken_s) * 1000
        end_ns = self.telemetry.now_ns()
        self.telemetry.span(
            "prefill compute",
            traceparent=job.request.traceparent,
            minted=job.traceparent,
            start_ns=end_ns - int(held_ms * 1e6),
            end_ns=end_ns,
            num_cached_tokens=job.num_cached_tokens,
            num_computed_tokens=job.sequence.num_computed_tokens - job.num_cached_tokens,
            worker=self.instance,
            outcome=outcome,
            **consumed(job.request, self.subjects.prefill("*")),
        )

    # -- reports ---------------------------------------------------------------------------------------------------------
    def load(self, sequence: int, ended: list[EndedRequest]) -> WorkerLoad:
        scheduler, spec = self.scheduler, self.engine.spec
        self.telemetry.gauge("prefill_tasks_held", len(self.jobs()))
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
