"""What routers tell each other: every route, so that all book the same load."""

from __future__ import annotations

import time

from services.router.decide import Decision
from services.router.load import Booking, Loads
from shared.bus.base import Bus, Subscription
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode, encode
from shared.messages.fleet import Route
from shared.messages.request import GenerateRequest
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import InstanceId


class Routes:
    """Announces our own routes, and books those of the others."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry, loads: Loads, instance: InstanceId) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._loads = loads
        self._instance = instance
        self._sequence = 0

    async def announce(self, request: GenerateRequest, decision: Decision) -> None:
        """Before the task is queued: nobody hears of its end before its beginning."""
        self._sequence += 1
        route = Route(
            router=self._instance,
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
            await self._bus.publish(self._subjects.route_event(self._instance), encode(route))
        except BusClosed:
            raise
        except BusError as error:  # the workers' reports correct the other routers
            self._telemetry.count("router_routes_lost", reason=error.code)

    async def follow(self, events: Subscription) -> None:
        """Book what other routers send, for ever."""
        async for message in events:
            try:
                route = decode(Route, message.payload)
            except MalformedMessage:
                self._telemetry.count("malformed_messages", kind="route")
                continue
            if route.router != self._instance:
                self._book(route)

    def _book(self, route: Route) -> None:
        key, now_s = f"{route.request_id}:{route.epoch}", time.monotonic()
        decode_tokens = 0 if route.prefill_worker else route.num_uncached_tokens
        self._loads.book(key, route.decode_worker, Booking(route.num_blocks, decode_tokens, now_s))
        if route.prefill_worker is not None:
            self._loads.book(key, route.prefill_worker, Booking(0, route.num_uncached_tokens, now_s))
