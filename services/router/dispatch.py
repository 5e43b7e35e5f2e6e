"""Sends what was decided: the task to its worker or the refusal to its gateway, then the ack. What is under way counts as held."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec

from services.router.decide import Decision
from services.router.explain import explanation
from services.router.index import PrefixIndex
from services.router.load import Loads
from services.router.miss import miss_reason
from services.router.queue import Waiting
from shared.bus.base import Bus
from shared.errors import BusClosed, BusError, MalformedMessage, RequestError, WorkerLost
from shared.fleet import Fleet
from shared.messages.codec import decode, encode
from shared.messages.request import DecodeTask, GenerateRequest, PrefillTask
from shared.messages.session import Finish, Routed
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.telemetry.conventions import consumed
from shared.telemetry.logs import concern
from shared.types import InstanceId
from shared.worker.finish import send_finish
from shared.worker.intake import acknowledge

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]
Announce = Callable[[GenerateRequest, Decision], Coroutine[Any, Any, None]]

log = logging.getLogger(__name__)


class Dispatcher:
    """`requeue` gets back what could not be sent; `announce` tells the other routers what was."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        telemetry: Telemetry,
        fleet: Fleet,
        loads: Loads,
        index: PrefixIndex,
        instance: InstanceId,
        spawn: Spawn,
        requeue: Callable[[Waiting], None],
        announce: Announce,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._fleet = fleet
        self._loads = loads
        self._index = index
        self._instance = instance
        self._spawn = spawn
        self._requeue = requeue
        self._announce = announce
        self._leaving: dict[str, Waiting] = {}
        """Routed or refused, and not acked yet."""
        self._sending: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Waiting]:
        """What is under way."""
        return iter(list(self._leaving.values()))

    def redelivered(self, waiting: Waiting) -> bool:
        """Whether this attempt is under way already; its newest delivery is then the one to ack."""
        held = self._leaving.get(waiting.request.msg_id)
        if held is not None:
            held.delivery = waiting.delivery
        return held is not None

    def send(self, waiting: Waiting, decision: Decision) -> None:
        """To the worker that was chosen."""
        self._begin(waiting, self._dispatch(waiting, decision), "dispatch")

    def refuse(self, waiting: Waiting, error: RequestError) -> None:
        """To the gateway, as the end of the request."""
        self._telemetry.count("router_refused", reason=error.code)
        self._begin(waiting, self._send_refusal(waiting, error), "refusal")

    async def settle(self) -> None:
        """Until nothing is under way."""
        if self._sending:
            await asyncio.wait(self._sending)

    async def dead_letter(self, payload: bytes, subject: str) -> None:
        """A task that killed or outlived its worker three times."""
        is_prefill = subject.startswith(self._subjects.prefill("*").rstrip("*"))
        queue = "prefill" if is_prefill else "decode"
        self._telemetry.count("router_dead_letters", queue=queue)
        try:
            task: PrefillTask | DecodeTask = decode(PrefillTask, payload) if is_prefill else decode(DecodeTask, payload)
        except MalformedMessage:
            self._telemetry.count("malformed_messages", kind=queue)
            return
        self._loads.release(task.request.msg_id)
        await self._finish(task.request, WorkerLost("the request failed at its worker three times"))

    def _begin(self, waiting: Waiting, work: Coroutine[Any, Any, None], name: str) -> None:
        self._leaving[waiting.request.msg_id] = waiting
        task = self._spawn(work, name)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _dispatch(self, waiting: Waiting, decision: Decision) -> None:
        """Queue the task, then ack the request: in between, a crash means a second task, and the gateway takes one instance's only."""
        concern(waiting.request.request_id, waiting.request.traceparent)
        queue_s, decided_ns = time.monotonic() - waiting.taken_s, self._telemetry.now_ns()
        request = msgspec.structs.replace(waiting.request, deadline_ms=max(int(waiting.request.deadline_ms - queue_s * 1000), 0))
        subject, payload, worker = self._task(request, decision, queue_s * 1000)
        await self._announce(request, decision)
        if request.explain:
            await self._explain(request, decision)
        try:
            await self._bus.enqueue(subject, payload, msg_id=f"{request.msg_id}:{worker}")
        except BusClosed:
            raise
        except BusError as error:
            self._give_back(waiting, error)
            return
        await acknowledge(waiting.delivery)
        self._leaving.pop(request.msg_id, None)
        self._report(request, decision, queue_s, decided_ns)

    async def _explain(self, request: GenerateRequest, decision: Decision) -> None:
        """Before the task is queued, so that it is there before the first token."""
        told = encode(Routed(request.request_id, request.epoch, explanation(decision, self._name_of)))
        try:
            await self._bus.publish(self._subjects.tokens(request.gateway), told)
        except BusClosed:
            raise
        except BusError as error:
            log.info("an explanation was lost: %s", error)

    def _name_of(self, instance: InstanceId) -> str:
        lease = self._fleet.get(instance)
        return lease.name if lease else instance

    def _task(self, request: GenerateRequest, decision: Decision, queue_ms: float) -> tuple[str, bytes, InstanceId]:
        if decision.prefill_worker is None:
            task = DecodeTask(request, self._instance, decision.decode_worker, queue_ms=queue_ms, may_be_held=decision.may_be_held)
            return self._subjects.decode(decision.decode_worker), encode(task), decision.decode_worker
        state = self._loads.workers.get(decision.decode_worker)
        host = state.lease.host if state else None
        prefill = PrefillTask(
            request, self._instance, decision.prefill_worker, decision.decode_worker, host, queue_ms, decision.may_be_held
        )
        return self._subjects.prefill(decision.prefill_worker), encode(prefill), decision.prefill_worker

    def _give_back(self, waiting: Waiting, error: BusError) -> None:
        """The worker's queue is full or the link is down: wait again, for another choice."""
        self._telemetry.count("router_requeued", reason=error.code)
        log.warning("a task could not be queued: %s", error)
        self._leaving.pop(waiting.request.msg_id, None)
        self._loads.release(waiting.request.msg_id)
        waiting.is_gone = False
        self._requeue(waiting)

    def _report(self, request: GenerateRequest, decision: Decision, queue_s: float, decided_ns: int) -> None:
        """What was decided and why, told after it was done. The stage is over when it is decided: what follows is its worker's."""
        self._telemetry.count("router_routed", reason=decision.reason)
        self._telemetry.count("router_prompt_tokens", request.num_tokens)
        self._telemetry.count("router_overlap_tokens", decision.num_overlap_tokens)
        miss = miss_reason(request, decision, self._index)
        if miss:
            self._telemetry.count("router_miss_tokens", decision.num_uncached_tokens, reason=miss)
        if decision.hint.sketches:
            self._telemetry.count("router_similar", outcome="none" if decision.hint.neighbour is None else "found")
        self._telemetry.observe("router_queue_seconds", queue_s)
        self._telemetry.span(
            "router route",
            traceparent=request.traceparent,
            minted="",
            start_ns=decided_ns - int(queue_s * 1e9),
            end_ns=decided_ns,
            decode_worker=decision.decode_worker,
            prefill_worker=decision.prefill_worker or "",
            reason=decision.reason,
            num_overlap_tokens=decision.num_overlap_tokens,
            num_uncached_tokens=decision.num_uncached_tokens,
            num_known_blocks=decision.num_known_blocks,
            similar_blocks=decision.hint.neighbour.num_blocks if decision.hint.neighbour else 0,
            miss=miss,
            diverged_at=decision.num_overlap_tokens if miss == "diverged" else -1,
            candidates=" ".join(map(str, decision.candidates)),
            **consumed(request, self._subjects.request("*", "*")),
        )

    async def _send_refusal(self, waiting: Waiting, error: RequestError) -> None:
        concern(waiting.request.request_id, waiting.request.traceparent)
        await self._finish(waiting.request, error)
        await acknowledge(waiting.delivery)
        self._leaving.pop(waiting.request.msg_id, None)

    async def _finish(self, request: GenerateRequest, error: RequestError) -> None:
        finish = Finish(
            request_id=request.request_id,
            epoch=request.epoch,
            instance=self._instance,
            error_code=error.code,
            error_message=error.message,
            retry_after_s=error.retry_after_s,
        )
        await send_finish(self._bus, self._subjects, self._fleet, self._telemetry, request.gateway, finish)
