"""A decode worker's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import msgspec

from services.decode.budget import PrefillBudget
from services.decode.config import DecodeConfig
from services.decode.job import Job, State
from services.decode.loading import load_prefix, may_load
from services.decode.scheduler import DecodeScheduler
from shared.bus.base import Bus, Delivery, Message, Subscription
from shared.engine.batch import Batch
from shared.engine.engine import Sampled
from shared.errors import BusClosed, BusError, EngineError, SlipstreamError
from shared.ewma import Ewma
from shared.kv.block_pool import BlockPool
from shared.messages.codec import decode, encode
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.request import DecodeTask
from shared.messages.session import Resend, ResendReply, TokenBatch, TokenDelta
from shared.telemetry import Telemetry
from shared.telemetry.conventions import consumed
from shared.telemetry.logs import concern, ids_of
from shared.telemetry.telemetry import Attribute
from shared.types import InstanceId
from shared.worker.chain import Chain
from shared.worker.finish import send_finish
from shared.worker.worker_service import WorkerService

log = logging.getLogger(__name__)


class DecodeService(WorkerService[Job, DecodeTask]):
    """The loop is `admit · schedule · forward · publish`; everything that waits (loads, finishes, write-back) runs beside it."""

    role = "decode"
    scheduler: DecodeScheduler

    def __init__(self, config: DecodeConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__("decode", DecodeTask, config.service, config.engine, config.kv_dir, bus, telemetry, instance)
        self.config = config
        self._finishing: dict[str, Job] = {}
        """Jobs whose Finish is not answered yet: they can still be resent."""
        self._step_ms = Ewma()
        self._load_rate = Ewma()

    # -- life ------------------------------------------------------------------------------------------------------------
    def prepare(self, pool: BlockPool) -> None:
        spec, config = self.engine.spec, self.config
        budget = PrefillBudget(config.prefill_budget, config.slo_itl_ms)
        self.scheduler = DecodeScheduler(
            pool, spec.layout.block_size, config.max_num_seqs, spec.max_model_len, spec.eos_token_ids, budget, time.monotonic
        )

    async def serve_verbs(self) -> list[Subscription]:
        return [await self.bus.serve(self.subjects.worker(self.instance, "resend"), self._resend)]

    def jobs(self) -> Sequence[Job]:
        return [*self.scheduler.jobs.values(), *self._finishing.values()]

    def begin(self, task: DecodeTask, delivery: Delivery, chain: Chain | None) -> None:
        self.scheduler.add(Job(task, delivery, chain, time.monotonic()))

    def describe(self) -> WorkerLease:
        config = self.config
        return msgspec.structs.replace(super().describe(), max_num_seqs=config.max_num_seqs, prefill_budget=config.prefill_budget)

    def detail(self) -> str:
        spec = self.engine.spec
        return f"{spec.model_name} {spec.dtype} · {spec.num_blocks} blocks · {self.config.max_num_seqs} slots"

    # -- the loop --------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        while True:
            self.wake.clear()
            await self._admit()
            batch = self.scheduler.schedule()
            await self._collect_ended()
            if batch is None:
                await self.wake.wait()
                continue
            await self._publish(await self._forward(batch))

    async def _admit(self) -> None:
        """Let go of what was cancelled, give blocks to what waits."""
        for job in [job for job in self.jobs() if job.is_cancelled and job.state is not State.LOADING]:
            self.scheduler.remove(job)
            if self._finishing.pop(job.sequence.key, None) is None:
                self._record(job, job.fate)
            await self._forget(job, job.fate)
        for job in self.scheduler.place():
            if not may_load(job):
                self.scheduler.loaded(job, 0)
                continue
            job.beside = self.spawn(self._load_prefix(job), "load")
            job.beside.add_done_callback(partial(self._load_ended, job))

    async def _forward(self, batch: Batch) -> list[Job]:
        """One step in the engine's thread. If it fails, each of its sequences is computed alone: only those at fault end."""
        started = time.monotonic()
        try:
            sampled: list[Sampled] = await self.in_engine(self.engine.forward, batch)
        except Exception as error:  # whatever a forward raises, it is its requests' fate and not the process's
            failed = [self.scheduler.jobs[item.sequence.key].request for item in batch.items]
            ids = ids_of(failed[0].request_id, failed[0].traceparent) if len(failed) == 1 else {}
            log.exception("a step of %d sequences failed", len(failed), extra=ids)
            self.telemetry.count("engine_errors")
            if len(batch.items) == 1:
                return self._fail(self.scheduler.jobs[batch.items[0].sequence.key], error)
            return [job for item in batch.items for job in await self._forward(Batch([item]))]
        step_ms = (time.monotonic() - started) * 1000
        num_decoding = sum(1 for item in batch.items if item.num_tokens == 1)
        self.scheduler.budget.observe(step_ms, batch.num_tokens - num_decoding, num_decoding)
        self._step_ms.add(step_ms)
        self.telemetry.observe("decode_step_seconds", step_ms / 1000)
        return self.scheduler.commit(batch, sampled)

    def _fail(self, job: Job, error: Exception) -> list[Job]:
        job.error = error if isinstance(error, SlipstreamError) else EngineError("the engine failed to compute a step")
        self.scheduler.fail(job)
        return []

    async def _publish(self, changed: list[Job]) -> None:
        """One TokenBatch a gateway, then whatever this step ended."""
        by_gateway: defaultdict[InstanceId, list[TokenDelta]] = defaultdict(list)
        for job in changed:
            if not job.is_cancelled:
                by_gateway[job.request.gateway].append(job.delta(job.sequence.num_output_tokens - 1))
        for gateway, deltas in by_gateway.items():
            await self._send_tokens(gateway, deltas)
        self.presence.write_back(self.scheduler.take_full_blocks())
        await self._collect_ended()

    async def _send_tokens(self, gateway: InstanceId, deltas: list[TokenDelta]) -> None:
        try:
            await self.bus.publish(self.subjects.tokens(gateway), encode(TokenBatch(self.instance, deltas)))
        except BusClosed:
            raise
        except BusError:  # the gateway sees the gap and asks again
            self.telemetry.count("token_batches_dropped")

    # -- what runs beside the loop -----------------------------------------------------------------------------------------
    async def _load_prefix(self, job: Job) -> None:
        concern(job.request.request_id, job.request.traceparent)
        started = time.monotonic()
        start_ns = self.telemetry.now_ns()
        ms_per_token = self.scheduler.budget.ms_per_token.value
        traceparent = self.telemetry.begin(job.request.traceparent)
        result = await load_prefix(job, self.presence.kv, self.scheduler.block_size, ms_per_token, self.telemetry, traceparent)
        self.scheduler.loaded(job, result.num_blocks)
        job.num_loaded_blocks, job.num_loaded_bytes = result.num_blocks, result.num_bytes
        if result.num_bytes:
            self._load_rate.add(result.num_bytes / max(time.monotonic() - started, 1e-6))
        self.telemetry.span(
            "decode load",
            traceparent=job.request.traceparent,
            minted=traceparent,
            start_ns=start_ns,
            end_ns=self.telemetry.now_ns(),
            num_blocks=result.num_blocks,
            num_bytes=result.num_bytes,
            reason=result.reason,
        )

    def _load_ended(self, job: Job, task: asyncio.Task[None]) -> None:
        """Also if it was broken off: nothing is copied into the job's blocks any more."""
        job.beside = None
        if job.state is State.LOADING:
            self.scheduler.loaded(job, 0)
        self.wake.set()

    async def _collect_ended(self) -> None:
        """Jobs that ended leave the scheduler; their Finish is sent beside the loop."""
        for job in [job for job in self.scheduler.jobs.values() if job.state is State.ENDED]:
            self.scheduler.remove(job)
            if job.is_cancelled:
                self._record(job, job.fate)
                await self._forget(job, job.fate)
                continue
            self._finishing[job.sequence.key] = job
            job.beside = self.spawn(self._finish(job, self.instance), "finish")

    async def _finish(self, job: Job, instance: InstanceId) -> None:
        request = job.request
        concern(request.request_id, request.traceparent)
        self._record(job, job.error.code if job.error else str(job.reason))

        async def resend(index: int) -> None:
            await self._send_tokens(request.gateway, [job.delta(index)])

        finish = job.finish(instance, time.monotonic())
        was_answered = await send_finish(self.bus, self.subjects, self.fleet, self.telemetry, request.gateway, finish, resend)
        if self._finishing.pop(job.sequence.key, None) is not None:
            job.beside = None
            outcome = "gateway_gone" if not was_answered else job.error.code if job.error else str(job.reason)
            await self._forget(job, outcome)

    def _record(self, job: Job, outcome: str) -> None:
        """The stage, whatever its end: the `outcome` is a finish reason, an error code, or why nobody wants it any more."""
        end_ns = self.telemetry.now_ns()
        error: dict[str, Attribute] = {"error.type": job.error.code} if job.error else {}
        self.telemetry.span(
            "decode generate",
            traceparent=job.request.traceparent,
            minted="",
            start_ns=end_ns - int((time.monotonic() - job.taken_s) * 1e9),
            end_ns=end_ns,
            num_output_tokens=job.num_new_tokens,
            num_computed_prompt_tokens=job.num_computed_prompt_tokens,
            worker=self.instance,
            outcome=outcome,
            **consumed(job.request, self.subjects.decode("*")),
            **error,
        )

    async def _forget(self, job: Job, outcome: str) -> None:
        self.telemetry.count("decode_ended", outcome=outcome)
        await self.forget(job)

    # -- messages --------------------------------------------------------------------------------------------------------
    async def _resend(self, message: Message) -> bytes:
        asked = decode(Resend, message.payload)
        key = f"{asked.request_id}:{asked.epoch}"
        job = self.scheduler.jobs.get(key) or self._finishing.get(key)
        self.telemetry.count("resends")
        return encode(ResendReply(job.delta(asked.index) if job is not None else None))

    # -- reports ---------------------------------------------------------------------------------------------------------
    def load(self, sequence: int, ended: list[EndedRequest]) -> WorkerLoad:
        scheduler, spec = self.scheduler, self.engine.spec
        num_running = len(scheduler.running)
        self.telemetry.gauge("decode_running", num_running)
        self.telemetry.gauge("decode_waiting", len(scheduler.jobs) - num_running)
        self.telemetry.gauge("device_used_blocks", scheduler.pool.num_used)
        self.telemetry.count("decode_preemptions", scheduler.take_preemptions())
        ms_per_token = scheduler.budget.ms_per_token.value
        return WorkerLoad(
            worker=self.instance,
            role="decode",
            model=spec.model_digest.hex()[:16],
            sequence=sequence,
            num_running=num_running,
            num_waiting=len(scheduler.jobs) - num_running,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=spec.num_blocks,
            num_used_blocks=scheduler.pool.num_used,
            step_ms=self._step_ms.value,
            prefill_tokens_per_s=1000 / ms_per_token if ms_per_token else 0.0,
            load_bytes_per_s=self._load_rate.value,
            utilisation=num_running / self.config.max_num_seqs,
            ended=ended,
        )
