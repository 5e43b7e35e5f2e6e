"""The bus over NATS, put together of its parts. `nats.connect` makes it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

from shared.bus.base import Bucket, Bus, Consumer, DeadLetterHandler, Handler, Headers, LinkClock, Message, Subscription
from shared.bus.bucket import NatsBucket
from shared.bus.dead_letters import DeadLetters
from shared.bus.inbound import Inbound
from shared.bus.jetstream import JetStream
from shared.bus.requests import Requests
from shared.bus.responder import Responder
from shared.bus.spec import StreamSpec
from shared.bus.streams import consumer_spec, spec_behind, spec_of_bucket, spec_of_stream
from shared.bus.wire import Stop, Wire
from shared.bus.work_queue import WorkQueue
from shared.errors import BusClosed, BusError, BusTimeout, NoResponders, PermissionDenied, StreamMissing

log = logging.getLogger(__name__)

ENQUEUE_S = 5.0
ATTEMPT_S = 1.0
RETRY_S = 0.1
FOLDER_GONE_S = 0.3
"""nats-server removes a deleted stream's folder behind its answer: one that is made again meanwhile loses it, and can store nothing."""


class NatsBus(Bus):
    """Core messages go out at once or never; JetStream goes through `JetStream`; wiped streams are made again by their rules."""

    def __init__(self, wire: Wire, clock: LinkClock) -> None:
        self.clock = clock
        self.counts = wire.counts
        self.max_message_bytes = wire.max_message_bytes
        self.requests = Requests(wire)
        self.jetstream = JetStream(self.requests)
        self._wire = wire
        self._inboxes = itertools.count()
        self._inbound: set[Inbound] = set()
        self._is_closing = False
        self._dead_letters: list[DeadLetters] = []
        self._consumers: list[WorkQueue] = []

    async def open(self) -> None:
        """Once, after the wire is connected."""
        await self.requests.open()
        self._wire.on_closed(self._lost_for_good)

    @property
    def is_connected(self) -> bool:
        return self._wire.is_connected

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        await self._wire.send(subject, payload, reply, headers)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        return await self.requests.one(subject, payload, timeout_s=timeout_s, headers=headers)

    def request_many(self, subject: str, payload: bytes, *, stall_s: float, headers: Headers | None = None) -> AsyncIterator[Message]:
        return self.requests.many(subject, payload, stall_s=stall_s, headers=headers)

    async def subscribe(self, subject: str, *, queue: str = "", max_messages: int = 65_536, max_bytes: int = 64 * 2**20) -> Subscription:
        inbound = Inbound(max_messages, max_bytes, self._count_drop)
        stop = await self._wire.listen(subject, inbound.push, queue)

        async def leave() -> None:
            self._inbound.discard(inbound)
            await self._left(stop)

        inbound.stop = leave
        self._inbound.add(inbound)
        await self._confirm(subject, inbound)
        return inbound

    async def serve(self, subject: str, handler: Handler, *, queue: str = "", concurrency: int = 256) -> Subscription:
        responder = Responder(handler, self.publish, concurrency, self.counts)
        responder.stop = partial(self._left, await self._wire.listen(subject, responder.take, queue))
        await self._confirm(subject, responder)
        return responder

    async def enqueue(self, subject: str, payload: bytes, *, msg_id: str, headers: Headers | None = None) -> bool:
        sent = {**(headers or {}), "Nats-Msg-Id": msg_id}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ENQUEUE_S
        while True:
            try:
                ack = await self.jetstream.publish(subject, payload, headers=sent, timeout_s=ATTEMPT_S)
                return not ack.duplicate
            except (BusTimeout, NoResponders) as error:
                if loop.time() + RETRY_S >= deadline:
                    raise BusTimeout(subject, ENQUEUE_S) from error
                self.counts["enqueue_retry"] += 1
                if isinstance(error, BusTimeout):
                    await asyncio.sleep(RETRY_S)
                else:
                    await self._restore_behind(subject)

    async def consume(self, stream: str, durable: str, subject: str, *, window: int, max_deliver: int | None = None) -> Consumer:
        consumer = WorkQueue(
            self._wire,
            self.jetstream,
            self.restore,
            stream=stream,
            durable=durable,
            subject=subject,
            window=window,
            spec=consumer_spec(stream, max_deliver),
            inbox=f"{self._wire.inbox}.p{next(self._inboxes):x}",
        )
        await consumer.open()
        self._consumers.append(consumer)
        return consumer

    async def delete_durable(self, stream: str, durable: str, purge_subject: str = "") -> None:
        try:
            await self.jetstream.delete_consumer(stream, durable)
        except StreamMissing:
            pass  # the durable or the whole stream is gone already
        if purge_subject:
            try:
                await self.jetstream.purge(stream, purge_subject)
            except StreamMissing:
                return

    async def on_dead_letter(self, stream: str, callback: DeadLetterHandler) -> None:
        dead_letters = DeadLetters(stream, callback, self._wire, self.jetstream, self.enqueue)
        await dead_letters.open()
        self._dead_letters.append(dead_letters)

    async def add_stream(self, spec: StreamSpec) -> None:
        if not await self.jetstream.create_stream(spec):
            try:
                await self.jetstream.update_stream(spec)
            except PermissionDenied:
                log.warning("%s differs from this version's rules, and this user may not change it", spec.name)

    async def bucket(self, name: str) -> Bucket:
        await self.add_stream(spec_of_bucket(name))
        return NatsBucket(name, self._wire, self.jetstream, self.restore)

    async def restore(self, stream: str) -> None:
        """Make a wiped stream or bucket again, empty. StreamMissing: it is not one of ours."""
        spec = spec_of_stream(stream)
        if spec.storage == "file":
            await asyncio.sleep(FOLDER_GONE_S)
        await self.add_stream(spec)
        self.counts["stream_restored"] += 1

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._wire.on_up(callback)

    def on_closed(self, callback: Callable[[], None]) -> None:
        self._wire.on_closed(callback)

    async def close(self) -> None:
        self._is_closing = True
        for consumer in self._consumers:
            await consumer.shut()
        for dead_letters in self._dead_letters:
            await dead_letters.close()
        for inbound in list(self._inbound):
            await inbound.close()
        self.requests.close()
        await self._wire.close()

    async def _confirm(self, subject: str, subscription: Subscription) -> None:
        """Return when the server knows of the subscription. While the link is down it will be made with the link."""
        try:
            await self.requests.confirm()
        except BusTimeout:
            return
        except PermissionDenied:
            pass  # of a message to ourselves: nothing is known, but the answer came after that to the subscription
        if subject.lower() in self._wire.denied_subscriptions:
            await subscription.close()
            raise PermissionDenied(subject)

    async def _left(self, stop: Stop) -> None:
        """Stop listening; when this returns, nothing more is on its way (unless the link is down, or closed with us)."""
        await stop()
        if not self._is_closing and self._wire.is_connected:
            with contextlib.suppress(BusError):  # cut off meanwhile: nothing is on its way either
                await self.requests.confirm()

    async def _restore_behind(self, subject: str) -> None:
        await asyncio.sleep(RETRY_S)
        await self.restore(spec_behind(subject).name)

    def _count_drop(self) -> None:
        self.counts["message_dropped"] += 1

    def _lost_for_good(self) -> None:
        error = BusClosed("the connection to NATS was closed for good", remedy="start the process again")
        self.requests.close()
        for inbound in self._inbound:
            inbound.fail(error)
