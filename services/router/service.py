"""A router's process: pulls requests, lets them wait, routes them, refuses what cannot be served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Iterable
from typing import Literal

from services.router.config import RouterConfig
from services.router.deadline import too_late
from services.router.decide import Decider, Decision
from services.router.dispatch import Dispatcher
from services.router.index import PrefixIndex
from services.router.kernel import KERNEL
from services.router.load import Booking, Loads
from services.router.peers import Peers
from services.router.queue import Waiting, WaitingQueue
from services.router.routes import Routes
from services.router.settings import Settings
from services.router.similarity import SimilarityIndex
from services.router.sync import IndexSync
from shared.attempts import Attempts
from shared.bus.base import Bus, Consumer, Delivery, Subscription
from shared.errors import BusClosed, BusError, MalformedMessage, NoCapacity, Overloaded, RequestError
from shared.messages.codec import decode
from shared.messages.fleet import WorkerLease, WorkerLoad
from shared.messages.request import Cancel, GenerateRequest
from shared.messages.session import HeldRequest
from shared.messages.subjects import REQUEST_CLASSES
from shared.service import Service
from shared.telemetry import Telemetry
from shared.types import InstanceId, RequestClass
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
        self.similarity = SimilarityIndex()
        self._decider = Decider(self.index, self.loads, config.disaggregation, random.Random(), self.similarity)
        self._settings = Settings(bus, self.subjects, telemetry, self._decider, self.similarity)
        self._sync = IndexSync(bus, self.subjects, telemetry, self.index, self.spawn)
        self._peers = Peers(bus, self.subjects, telemetry, self.fleet, self.index, self.loads, self._sync)
        self._routes = Routes(bus, self.subjects, telemetry, self.loads, self.similarity, self._settings, instance)
        self._dispatcher = Dispatcher(
            bus, self.subjects, telemetry, self.fleet, self.loads, self.index, instance, self.spawn, self._requeue, self._routes.announce
        )
        self._consumers: list[Consumer] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._is_draining = False

    # -- life ------------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        self.spawn(self._sync.follow(await self.bus.subscribe(self.subjects.kv_event("*"))), "kv-events")
        self.spawn(self.attempts.follow(self._on_cancel), "cancels")
        self.spawn(self._follow_loads(await self.bus.subscribe(self.subjects.load_event("*"))), "loads")
        self.spawn(self._routes.follow(await self.bus.subscribe(self.subjects.route_event("*"))), "routes")
        self.spawn(self._settings.follow(), "settings")
        self.spawn(self._settings.renew(), "terms")
        if KERNEL is None:
            self.telemetry.count("router_without_kernel")
        self.fleet.on_change(self._on_lease)
        await self._peers.open(self.instance)
        await self._peers.learn(self.instance)
        await self.bus.on_dead_letter(self.subjects.stream("prefill"), self._dispatcher.dead_letter)
        await self.bus.on_dead_letter(self.subjects.stream("decode"), self._dispatcher.dead_letter)
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
        self._pull_or_pause()
        self._route_waiting()
        await self._dispatcher.settle()

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
            waiting = Waiting(request, delivery, time.monotonic())
            if self._dispatcher.redelivered(waiting):
                continue
            may_run = self.attempts.known(request, delivery, self.instance)
            if may_run is not None:
                await self._settle(waiting, may_run)
            else:
                task = self.spawn(self._ask(waiting), "ask")
                self._asking.add(task)
                task.add_done_callback(self._asking.discard)
            self._pull_or_pause()

    def _pull_or_pause(self) -> None:
        is_full = len(self.queue) + len(self._asking) >= self.config.max_queued
        for consumer in self._consumers:
            if is_full or self._is_draining:
                consumer.pause()
            else:
                consumer.resume()

    async def _ask(self, waiting: Waiting) -> None:
        """Redelivered, old, or early in our life: the gateway is asked whether the attempt is wanted."""
        await self._settle(waiting, await self.attempts.may_run(waiting.request, waiting.delivery, self.instance))

    async def _settle(self, waiting: Waiting, may_run: bool) -> None:
        if may_run:
            self.queue.add(waiting)
            self._wake.set()
        else:
            self.telemetry.count("router_dropped", reason="not_wanted")
            await acknowledge(waiting.delivery)

    # -- the loop --------------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            self._wake.clear()
            self._route_waiting()
            self._pull_or_pause()
            self.telemetry.gauge("router_queued", len(self.queue))
            self.telemetry.gauge("router_index_blocks", len(self.index))
            self.telemetry.gauge("router_degraded_sources", self.index.num_degraded)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUTE_EVERY_S):  # not wait_for: in Python 3.11 it may swallow a cancellation
                    await self._wake.wait()

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
        """False: it must wait for room, and so must what comes behind it."""
        request = waiting.request
        if not self._decider.could_serve(request.model, request.num_tokens):
            self._refuse_or_hold(waiting)
            return True
        started = time.perf_counter()
        decision = self._decider.decide(request)
        self.telemetry.observe("router_decision_seconds", time.perf_counter() - started)
        if decision is None:
            if self._is_too_old(waiting):
                self._refuse(waiting, Overloaded("all workers were busy for too long", retry_after_s=RETRY_AFTER_S))
                return True
            return False
        now_s = time.monotonic()
        if not request.num_emitted and (late := too_late(request, now_s - waiting.taken_s, decision, self.loads)):
            self._refuse(waiting, late)
            return True
        self._book(request, decision, now_s)
        self.queue.routed(waiting)
        self._dispatcher.send(waiting, decision)
        return True

    def _refuse(self, waiting: Waiting, error: RequestError) -> None:
        self.queue.remove(waiting)
        self._dispatcher.refuse(waiting, error)

    def _requeue(self, waiting: Waiting) -> None:
        request = waiting.request
        if self.attempts.is_cancelled(request.request_id, request.epoch, self.instance):
            self._drop(waiting)
        else:
            self.queue.add(waiting)

    def _drop(self, waiting: Waiting) -> None:
        """It was cancelled."""
        self.queue.remove(waiting)
        self.telemetry.count("router_dropped", reason="cancelled")
        self.spawn(acknowledge(waiting.delivery), "ack")

    def _is_too_old(self, waiting: Waiting) -> bool:
        return time.monotonic() - waiting.taken_s > self.config.queue_ttl_s

    def _refuse_or_hold(self, waiting: Waiting) -> None:
        """No worker of the model: a new request is refused at once; one whose text has begun waits for a worker to come back."""
        held_s = time.monotonic() - waiting.taken_s
        if waiting.request.num_emitted and held_s < self.config.hold_s:
            return
        has_workers = bool(self.loads.pool("decode", waiting.request.model).states)
        what = "the prompt is larger than any worker's KV pool" if has_workers else "no worker serves this model now"
        self._refuse(waiting, NoCapacity(what, retry_after_s=RETRY_AFTER_S))

    def _book(self, request: GenerateRequest, decision: Decision, now_s: float) -> None:
        self.loads.book(request.msg_id, decision.decode_worker, Booking(decision.num_blocks, decision.num_decode_tokens, now_s))
        if decision.prefill_worker is not None:
            self.loads.book(request.msg_id, decision.prefill_worker, Booking(0, decision.num_uncached_tokens, now_s))

    # -- hearing ---------------------------------------------------------------------------------------------------------
    def _on_lease(self, lease: WorkerLease, is_alive: bool) -> None:
        self._sync.lease(lease, is_alive)
        if lease.role == "gateway" and not is_alive:
            for waiting in self.queue:
                if waiting.request.gateway == lease.instance:
                    self._drop(waiting)
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

    async def _follow_loads(self, events: Subscription) -> None:
        async for message in events:
            try:
                self.loads.report(decode(WorkerLoad, message.payload), time.monotonic())
            except MalformedMessage:
                self.telemetry.count("malformed_messages", kind="load")
                continue
            self._wake.set()

    def _on_cancel(self, cancel: Cancel) -> None:
        if cancel.worker is None:
            self.loads.release_up_to(cancel.request_id, cancel.epoch)
        for waiting in self.queue:
            request = waiting.request
            if request.request_id == cancel.request_id and self.attempts.is_cancelled(request.request_id, request.epoch, self.instance):
                self._drop(waiting)
        self._wake.set()

    # -- telling ---------------------------------------------------------------------------------------------------------
    def _held(self) -> Iterable[tuple[InstanceId, HeldRequest]]:
        for waiting in [*self.queue, *self._dispatcher]:
            request = waiting.request
            yield request.gateway, HeldRequest(request.request_id, request.epoch, "queued", request.num_emitted)

    def _deliveries(self) -> Iterable[Delivery]:
        return [waiting.delivery for waiting in [*self.queue, *self._dispatcher]]
