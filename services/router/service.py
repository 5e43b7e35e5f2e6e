"""A router's process: pulls requests, lets them wait, routes them, refuses what cannot be served."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterable
from typing import Literal

import msgspec

from services.router.config import RouterConfig
from services.router.decide import Decider, Decision
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.queue import Waiting, WaitingQueue
from services.router.sync import IndexSync
from shared.attempts import Attempts
from shared.bus.base import Bus, Consumer, Delivery, Message
from shared.errors import BusClosed, BusError, MalformedMessage, NoCapacity, Overloaded, RequestError, WorkerLost
from shared.messages.codec import decode, encode
from shared.messages.fleet import Route, WorkerLease, WorkerLoad
from shared.messages.request import Cancel, DecodeTask, GenerateRequest, PrefillTask
from shared.messages.session import Finish, HeldRequest
from shared.messages.subjects import REQUEST_CLASSES
from shared.service import Service
from shared.telemetry import Telemetry
from shared.types import InstanceId, RequestClass
from shared.worker.finish import send_finish
from shared.worker.intake import acknowledge, keep_in_progress
from shared.worker.progress import report_progress

PULL_WINDOW = 64
ROUTE_EVERY_S = 0.1
"""How often waiting requests are looked at again though nothing was heard: for time limits."""
RETRY_AFTER_S = 1.0

log = logging.getLogger(__name__)


class RouterService(Service):
    """The loop is: what waits, in order, is routed as soon as a worker has room. Everything else feeds index, loads and queue."""

    role = "router"

    def __init__(self, config: RouterConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self.attempts = Attempts(bus, self.subjects, telemetry, time.monotonic)
        self.index = PrefixIndex()
        self.loads = Loads()
        self.queue = WaitingQueue()
        self._decider = Decider(self.index, self.loads, config.disaggregation, random.Random())
        self._sync = IndexSync(bus, self.subjects, telemetry, self.index, self.spawn)
        self._leaving: dict[str, Waiting] = {}
        """Routed or refused, and not acked yet."""
        self._dispatching: set[asyncio.Task[None]] = set()
        self._consumers: list[Consumer] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._is_draining = False
        self._sequence = 0

    # -- life ------------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        self.spawn(self._sync.follow(), "kv-events")
        self.spawn(self.attempts.follow(self._on_cancel), "cancels")
        self.spawn(self._follow_loads(), "loads")
        self.spawn(self._follow_routes(), "routes")
        self.fleet.on_change(self._on_lease)
        await self.bus.serve(self.subjects.router(self.instance, "index"), self._describe_index)
        await self.bus.on_dead_letter(self.subjects.stream("prefill"), self._on_dead_letter)
        await self.bus.on_dead_letter(self.subjects.stream("decode"), self._on_dead_letter)
        for name in REQUEST_CLASSES:
            await self._pull_class(name)
        self.spawn(self._run(), "route-loop")
        self.spawn(report_progress(self.bus, self.subjects, lambda: self.instance, "router", self._held), "progress")
        self.spawn(keep_in_progress(self._deliveries), "in-progress")

    async def _pull_class(self, name: RequestClass) -> None:
        subject = self.subjects.request(name, "*")
        consumer = await self.bus.consume(
            self.subjects.stream("requests"), self.subjects.durable("requests", name), subject, window=PULL_WINDOW
        )
        self._consumers.append(consumer)
        self.spawn(self._pull(consumer), f"pull-{name}")

    async def drain(self) -> None:
        """Pull no more; route what can be routed now. What still waits is not acked, and JetStream gives it to another router."""
        self._is_draining = True
        for consumer in self._consumers:
            consumer.pause()
        self._route_waiting()
        if self._dispatching:
            await asyncio.wait(self._dispatching)

    async def stop(self) -> None:
        for consumer in self._consumers:
            await consumer.close()

    # -- taking requests -------------------------------------------------------------------------------------------------
    async def _pull(self, consumer: Consumer) -> None:
        while True:
            try:
                delivery = await consumer.next()
            except BusClosed:
                if self._is_draining:
                    return
                raise
            try:
                request = decode(GenerateRequest, delivery.message.payload)
            except MalformedMessage as error:
                self.telemetry.count("malformed_messages", kind="request")
                log.warning("a request was dropped: %s", error)
                await delivery.term()
                continue
            if len(self.queue) + len(self._asking) >= self.config.max_queued:
                consumer.pause()
            task = asyncio.create_task(self._consider(request, delivery, consumer))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _consider(self, request: GenerateRequest, delivery: Delivery, consumer: Consumer) -> None:
        """Redelivered, old, or early in our life: the gateway is asked whether the attempt is wanted."""
        leaving = self._leaving.get(request.msg_id)
        if leaving is not None:
            leaving.delivery = delivery
        elif await self.attempts.may_run(request, delivery, self.instance):
            self.queue.add(Waiting(request, delivery, time.monotonic()))
            self._wake.set()
        else:
            self.telemetry.count("router_dropped", reason="not_wanted")
            await acknowledge(delivery)
        if len(self.queue) < self.config.max_queued and not self._is_draining:
            consumer.resume()

    # -- the loop --------------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._route_waiting()
            self.telemetry.gauge("router_queued", len(self.queue))
            self.telemetry.gauge("router_index_blocks", len(self.index))
            try:
                await asyncio.wait_for(self._wake.wait(), ROUTE_EVERY_S)
            except TimeoutError:
                pass

    def _route_waiting(self) -> None:
        """In order; behind the first request of a model that must wait, that model's others wait too (no overtaking, no starving)."""
        blocked: set[str] = set()
        for waiting in self.queue.in_order():
            if waiting.request.model in blocked:
                if self._is_too_old(waiting):
                    self._refuse(waiting, Overloaded("the request waited too long for a worker", retry_after_s=RETRY_AFTER_S))
            elif not self._route(waiting):
                blocked.add(waiting.request.model)

    def _route(self, waiting: Waiting) -> bool:
        """False: it must wait."""
        request = waiting.request
        if not self._decider.could_serve(request.model, request.num_tokens):
            return self._refuse_or_hold(waiting)
        started = time.perf_counter()
        decision = self._decider.decide(request)
        self.telemetry.observe("router_decision_seconds", time.perf_counter() - started)
        if decision is None:
            if self._is_too_old(waiting):
                self._refuse(waiting, Overloaded("all workers were busy for too long", retry_after_s=RETRY_AFTER_S))
                return True
            return False
        self._book(request, decision, time.monotonic())
        self.queue.routed(waiting)
        self._leaving[request.msg_id] = waiting
        task = self.spawn(self._dispatch(waiting, decision), "dispatch")
        self._dispatching.add(task)
        task.add_done_callback(self._dispatching.discard)
        return True

    def _is_too_old(self, waiting: Waiting) -> bool:
        return time.monotonic() - waiting.taken_s > self.config.queue_ttl_s

    def _refuse_or_hold(self, waiting: Waiting) -> bool:
        """No worker of the model: a new request is refused at once; one whose text has begun waits for a worker to come back."""
        held_s = time.monotonic() - waiting.taken_s
        if waiting.request.num_emitted and held_s < self.config.hold_s:
            return False
        has_workers = bool(self.loads.of_model("decode", waiting.request.model))
        what = "the prompt is larger than any worker's KV pool" if has_workers else "no worker serves this model now"
        self._refuse(waiting, NoCapacity(what, retry_after_s=RETRY_AFTER_S))
        return True

    def _book(self, request: GenerateRequest, decision: Decision, now_s: float) -> None:
        self.loads.book(request.msg_id, decision.decode_worker, Booking(decision.num_blocks, decision.num_decode_tokens, now_s))
        if decision.prefill_worker is not None:
            self.loads.book(request.msg_id, decision.prefill_worker, Booking(0, decision.num_uncached_tokens, now_s))

    # -- dispatching -----------------------------------------------------------------------------------------------------
    async def _dispatch(self, waiting: Waiting, decision: Decision) -> None:
        """Queue the task, then ack the request: in between, a crash means a second task, and the gateway takes one instance's only."""
        queue_s = time.monotonic() - waiting.taken_s
        request = msgspec.structs.replace(waiting.request, deadline_ms=max(int(waiting.request.deadline_ms - queue_s * 1000), 0))
        subject, payload, worker = self._task(request, decision, queue_s * 1000)
        try:
            await self.bus.enqueue(subject, payload, msg_id=f"{request.msg_id}:{worker}")
        except BusClosed:
            raise
        except BusError as error:
            self._requeue(waiting, error)
            return
        await acknowledge(waiting.delivery)
        self._leaving.pop(request.msg_id, None)
        self._report(request, decision, queue_s)
        await self._publish_route(request, decision)

    def _task(self, request: GenerateRequest, decision: Decision, queue_ms: float) -> tuple[str, bytes, InstanceId]:
        if decision.prefill_worker is None:
            task = DecodeTask(request, self.instance, decision.decode_worker, queue_ms=queue_ms, may_be_held=decision.may_be_held)
            return self.subjects.decode(decision.decode_worker), encode(task), decision.decode_worker
        host = self.loads.workers[decision.decode_worker].lease.host if decision.decode_worker in self.loads.workers else None
        prefill = PrefillTask(request, self.instance, decision.prefill_worker, decision.decode_worker, host, queue_ms, decision.may_be_held)
        return self.subjects.prefill(decision.prefill_worker), encode(prefill), decision.prefill_worker

    def _requeue(self, waiting: Waiting, error: BusError) -> None:
        """The worker's queue is full or the link is down: wait again, for another choice."""
        self.telemetry.count("router_requeued", reason=error.code)
        log.warning("a task could not be queued: %s", error)
        self._leaving.pop(waiting.request.msg_id, None)
        self.loads.release(waiting.request.msg_id)
        waiting.is_gone = False
        self.queue.add(waiting)

    def _report(self, request: GenerateRequest, decision: Decision, queue_s: float) -> None:
        """What was decided and why, after it was done."""
        self.telemetry.count("router_routed", reason=decision.reason)
        self.telemetry.count("router_prompt_tokens", request.num_tokens)
        self.telemetry.count("router_overlap_tokens", decision.num_overlap_tokens)
        self.telemetry.observe("router_queue_seconds", queue_s)
        end_ns = self.telemetry.now_ns()
        self.telemetry.span(
            "router route",
            traceparent=request.traceparent,
            start_ns=end_ns - int(queue_s * 1e9),
            end_ns=end_ns,
            decode_worker=decision.decode_worker,
            prefill_worker=decision.prefill_worker or "",
            reason=decision.reason,
            num_overlap_tokens=decision.num_overlap_tokens,
            num_uncached_tokens=decision.num_uncached_tokens,
            scores=" ".join(f"{candidate.worker}:{candidate.score:.1f}" for candidate in decision.candidates[:16]),
        )

    async def _publish_route(self, request: GenerateRequest, decision: Decision) -> None:
        self._sequence += 1
        route = Route(
            router=self.instance,
            sequence=self._sequence,
            request_id=request.request_id,
            epoch=request.epoch,
            model=request.model,
            decode_worker=decision.decode_worker,
            prefill_worker=decision.prefill_worker,
            num_tokens=request.num_tokens,
            num_uncached_tokens=decision.num_uncached_tokens,
            num_blocks=decision.num_blocks,
            num_overlap_blocks=decision.num_overlap_blocks,
            partition=request.partition,
        )
        try:
            await self.bus.publish(self.subjects.route_event(self.instance), encode(route))
        except BusClosed:
            raise
        except BusError:  # the workers' reports correct the other routers
            return

    # -- refusing --------------------------------------------------------------------------------------------------------
    def _refuse(self, waiting: Waiting, error: RequestError) -> None:
        self.telemetry.count("router_refused", reason=error.code)
        self.queue.remove(waiting)
        self._leaving[waiting.request.msg_id] = waiting
        self.spawn(self._send_refusal(waiting, error), "refusal")

    async def _send_refusal(self, waiting: Waiting, error: RequestError) -> None:
        await self._finish(waiting.request, error)
        await acknowledge(waiting.delivery)
        self._leaving.pop(waiting.request.msg_id, None)

    async def _finish(self, request: GenerateRequest, error: RequestError) -> None:
        finish = Finish(
            request_id=request.request_id,
            epoch=request.epoch,
            instance=self.instance,
            error_code=error.code,
            error_message=error.message,
            retry_after_s=error.retry_after_s,
        )
        await send_finish(self.bus, self.subjects, self.fleet, self.telemetry, request.gateway, finish)

    async def _on_dead_letter(self, payload: bytes, subject: str) -> None:
        """A task that killed or outlived its worker three times."""
        queue = "prefill" if subject.startswith(self.subjects.prefill("*").rstrip("*")) else "decode"
        self.telemetry.count("router_dead_letters", queue=queue)
        try:
            task: PrefillTask | DecodeTask = decode(PrefillTask, payload) if queue == "prefill" else decode(DecodeTask, payload)
        except MalformedMessage:
            self.telemetry.count("malformed_messages", kind=queue)
            return
        self.loads.release(task.request.msg_id)
        await self._finish(task.request, WorkerLost("the request failed at its worker three times"))

    # -- hearing ---------------------------------------------------------------------------------------------------------
    def _on_lease(self, lease: WorkerLease, is_alive: bool) -> None:
        self._sync.lease(lease, is_alive)
        if lease.role in ("prefill", "decode"):
            self.loads.lease(lease, is_alive)
            if not is_alive:
                self.spawn(self._bury(lease), "bury")
        self._wake.set()

    async def _bury(self, lease: WorkerLease) -> None:
        """A dead worker's queue goes; its requests are the gateways' to submit again."""
        queue: Literal["prefill", "decode"] = "prefill" if lease.role == "prefill" else "decode"
        subject = self.subjects.prefill(lease.instance) if queue == "prefill" else self.subjects.decode(lease.instance)
        try:
            await self.bus.delete_durable(self.subjects.stream(queue), self.subjects.durable(queue, lease.instance), subject)
        except BusClosed:
            raise
        except BusError as error:
            log.warning("the queue of worker %s could not be deleted: %s", lease.instance, error)

    async def _follow_loads(self) -> None:
        async for message in await self.bus.subscribe(self.subjects.load_event("*")):
            try:
                self.loads.report(decode(WorkerLoad, message.payload), time.monotonic())
            except MalformedMessage:
                self.telemetry.count("malformed_messages", kind="load")
                continue
            self._wake.set()

    async def _follow_routes(self) -> None:
        """What other routers booked."""
        async for message in await self.bus.subscribe(self.subjects.route_event("*")):
            try:
                route = decode(Route, message.payload)
            except MalformedMessage:
                self.telemetry.count("malformed_messages", kind="route")
                continue
            if route.router == self.instance:
                continue
            key, now_s = f"{route.request_id}:{route.epoch}", time.monotonic()
            decode_tokens = 0 if route.prefill_worker else route.num_uncached_tokens
            self.loads.book(key, route.decode_worker, Booking(route.num_blocks, decode_tokens, now_s))
            if route.prefill_worker is not None:
                self.loads.book(key, route.prefill_worker, Booking(0, route.num_uncached_tokens, now_s))

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.worker is None:
            self.loads.release_up_to(cancel.request_id, cancel.epoch)
        for waiting in self.queue:
            request = waiting.request
            if request.request_id == cancel.request_id and self.attempts.is_cancelled(request.request_id, request.epoch, self.instance):
                self.queue.remove(waiting)
                self.telemetry.count("router_dropped", reason="cancelled")
                self.spawn(acknowledge(waiting.delivery), "ack")
        self._wake.set()

    # -- telling ---------------------------------------------------------------------------------------------------------
    def _held(self) -> Iterable[tuple[InstanceId, HeldRequest]]:
        for waiting in [*self.queue, *self._leaving.values()]:
            request = waiting.request
            yield request.gateway, HeldRequest(request.request_id, request.epoch, "queued", request.num_emitted)

    def _deliveries(self) -> Iterable[Delivery]:
        return [waiting.delivery for waiting in [*self.queue, *self._leaving.values()]]

    async def _describe_index(self, _message: Message) -> bytes:
        return msgspec.json.encode(self.index.summary())
