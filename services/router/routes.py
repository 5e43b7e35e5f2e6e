"""What routers tell each other: every route, so that all book the same load."""

from __future__ import annotations

import time
from collections.abc import Sequence

from services.router.decide import Decision
from services.router.load import Booking, Loads
from services.router.settings import Settings
from services.router.similarity import Remembered, SimilarityIndex, pack_sketches, unpack_sketches
from services.router.sketch import Sketch
from shared.bus.base import Bus, Subscription
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode, encode
from shared.messages.fleet import Route
from shared.messages.kv import KvPrefetch
from shared.messages.request import GenerateRequest
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import KEY_BYTES, InstanceId

MAX_KEYS_BYTES = 512 * KEY_BYTES
"""Of a prompt's keys, what a Route carries."""


class Routes:
    """Announces our own routes, and books those of the others."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        telemetry: Telemetry,
        loads: Loads,
        similarity: SimilarityIndex,
        settings: Settings,
        instance: InstanceId,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._loads = loads
        self._similarity = similarity
        self._settings = settings
        self._instance = instance
        self._sequence = 0

    async def announce(self, request: GenerateRequest, decision: Decision) -> None:
        """Before the task is queued: nobody hears of its end before its beginning."""
        self._sequence += 1
        hint = decision.hint
        keys = request.block_keys[:MAX_KEYS_BYTES] if hint.sketches else b""
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
            sketch_version=hint.version,
            sketches=pack_sketches(hint.sketches),
            block_keys=keys,
        )
        self._remember(route, hint.sketches)
        self._settings.see(request)
        try:
            await self._bus.publish(self._subjects.route_event(self._instance), encode(route))
            await self._prefetch(request, decision)
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
            if route.router == self._instance:
                continue
            self._book(route)
            try:
                self._remember(route, unpack_sketches(route.sketches))
            except ValueError:
                self._telemetry.count("malformed_messages", kind="route")

    def _remember(self, route: Route, sketches: Sequence[Sketch]) -> None:
        """Those who look like it will be told of it."""
        prompt = Remembered(route.block_keys, route.decode_worker, route.prefill_worker, key_of(route))
        self._similarity.add(route.partition, route.model, sketches, route.sketch_version, prompt)

    async def _prefetch(self, request: GenerateRequest, decision: Decision) -> None:
        """What the chosen host lacks in memory and somebody has, or will have, climbs while the request queues."""
        state = self._loads.workers.get(decision.decode_worker)
        digest = self._settings.model_digests.get(request.model)
        num_blocks = max(decision.num_known_blocks, decision.hint.neighbour.num_blocks if decision.hint.neighbour else 0)
        if state is None or state.lease.host is None or digest is None or num_blocks <= decision.num_fast_blocks:
            return
        message = KvPrefetch(
            digest, request.block_keys[: num_blocks * KEY_BYTES], [host for host in decision.sources if host != state.lease.host]
        )
        self._telemetry.count("router_prefetches")
        await self._bus.publish(self._subjects.kv(state.lease.host, "prefetch"), encode(message))

    def _book(self, route: Route) -> None:
        key, now_s = key_of(route), time.monotonic()
        decode_tokens = 0 if route.prefill_worker else route.num_uncached_tokens
        self._loads.book(key, route.decode_worker, Booking(route.num_blocks, decode_tokens, now_s))
        if route.prefill_worker is not None:
            self._loads.book(key, route.prefill_worker, Booking(0, route.num_uncached_tokens, now_s))


def key_of(route: Route) -> str:
    """As its request is booked."""
    return f"{route.request_id}:{route.epoch}"
