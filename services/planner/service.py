"""The planner's process: listen, sum up, publish."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from services.planner.config import PlannerConfig
from services.planner.observations import Observations
from services.planner.plan import PlanRecord
from shared.bus.base import Bus, Subscription
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode
from shared.messages.fleet import Plan, Route, UsageRecord, WorkerLease, WorkerLoad
from shared.service import Service
from shared.telemetry import Telemetry
from shared.types import InstanceId

M = TypeVar("M", bound=msgspec.Struct)

REASON = "observing only"

log = logging.getLogger(__name__)


class PlannerService(Service):
    """Guarantees:

    1. A plan says what is there: it changes nothing.
    2. Of several planners the oldest publishes; where two take themselves for it, the revision decides, and the loser counts a conflict.
    3. Events that were missed make the numbers less exact and nothing else: the planner holds no state that others need.
    """

    role = "planner"

    def __init__(self, config: PlannerConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self.observations = Observations(time.monotonic, config.plan_window_s, config.slo_ttft_ms, config.slo_itl_ms)
        self._record = PlanRecord(bus, self.subjects, telemetry)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        await self._follow("load", self.subjects.load_event("*"), WorkerLoad, self.observations.take_load)
        await self._follow("route", self.subjects.route_event("*"), Route, self.observations.take_route)
        await self._follow("usage", self.subjects.usage_event("*"), UsageRecord, self.observations.take_usage)
        self.fleet.on_change(self._fleet_changed)
        self.spawn(self._plan_often(), "plan")

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()

    def detail(self) -> str:
        return REASON

    async def _follow(self, kind: str, subject: str, message_type: type[M], take: Callable[[M], None]) -> None:
        subscription = await self.bus.subscribe(subject)
        self._subscriptions.append(subscription)
        self.spawn(self._take_all(kind, subscription, message_type, take), f"{kind}-events")

    async def _take_all(self, kind: str, subscription: Subscription, message_type: type[M], take: Callable[[M], None]) -> None:
        async for message in subscription:
            try:
                event = decode(message_type, message.payload)
            except MalformedMessage as error:
                self.telemetry.count("planner_malformed", kind=kind)
                log.warning("a %s event cannot be read: %s", kind, error, extra={"subject": message.subject})
                continue
            take(event)
            self.telemetry.count("planner_events", kind=kind)

    def _fleet_changed(self, lease: WorkerLease, is_alive: bool) -> None:
        if not is_alive:
            self.observations.forget(lease.instance)

    async def _plan_often(self) -> None:
        while True:
            await asyncio.sleep(self.config.plan_every_s)
            try:
                await self.plan()
            except BusClosed:
                raise
            except BusError as error:  # cut off: the next round brings newer numbers anyway
                log.warning("no plan this time: %s", error)

    async def plan(self) -> Plan | None:
        """Sum up and publish. None: another planner does."""
        observed = self.observations.summary()
        prefill, decode_workers = self.fleet.workers("prefill"), self.fleet.workers("decode")
        self._show(observed, prefill=len(prefill), decode=len(decode_workers))
        if not self._is_eldest():
            return None
        max_num_seqs = max((lease.max_num_seqs for lease in decode_workers), default=0)
        return await self._record.publish(Plan(0, len(prefill), len(decode_workers), max_num_seqs, REASON, observed))

    def _is_eldest(self) -> bool:
        planners = self.fleet.workers("planner")
        return not planners or planners[0].instance == self.instance

    def _show(self, observed: dict[str, float], **num_workers: Any) -> None:
        for role, number in num_workers.items():
            self.telemetry.gauge("planner_workers", number, role=role)
        for name, value in observed.items():
            self.telemetry.gauge("planner_observed", value, what=name)
        self.telemetry.gauge("planner_missed_routes", self.observations.num_missed_routes)
