"""The bus in one process, for tests: the same contract as NATS, without sockets. Faults can be played: `cut`, `mend`, `wipe`."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.bus.base import Bucket, Bus, Consumer, DeadLetterHandler, Handler, Headers, LinkClock, Message, Subscription
from shared.bus.inbound import Inbound
from shared.bus.memory_stream import MemoryBucket, MemoryConsumer, MemoryStream
from shared.bus.responder import Responder
from shared.bus.spec import StreamSpec
from shared.bus.streams import consumer_spec, dead_subject, spec_behind, spec_of_bucket, spec_of_stream, subject_matches
from shared.bus.wire import check_size
from shared.errors import BusClosed, BusTimeout, LinkDown, NoResponders

MAX_MESSAGE_BYTES = 2**20 * 9 // 10
NO_HEADERS: Headers = {}


class _Interest:
    """One subscription of one bus."""

    __slots__ = ("bus", "queue", "subject", "take")

    def __init__(self, bus: MemoryBus, subject: str, queue: str, take: Callable[[Message], None]) -> None:
        self.bus = bus
        self.subject = subject
        self.queue = queue
        self.take = take


class MemoryBroker:
    """What the buses of one test share: subscriptions, streams and buckets."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.monotonic = monotonic
        self.streams: dict[str, MemoryStream] = {}
        self._interests: list[_Interest] = []
        self._turns = itertools.count()
        self.dead_letter_handlers: dict[str, list[tuple[MemoryBus, DeadLetterHandler]]] = {}

    def wipe(self) -> None:
        """As if the server had been started with an empty store: streams, durables and buckets are gone."""
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.vanish()

    def add(self, interest: _Interest) -> Callable[[], None]:
        """Returns the function that removes it."""
        self._interests.append(interest)

        def remove() -> None:
            if interest in self._interests:
                self._interests.remove(interest)

        return remove

    def deliver(self, message: Message) -> int:
        """To every plain subscriber, and to one of each queue group. Returns how many got it."""
        plain: list[_Interest] = []
        groups: dict[tuple[str, str], list[_Interest]] = {}
        for interest in self._interests:
            if interest.bus.is_connected and subject_matches(interest.subject, message.subject):
                if interest.queue:
                    groups.setdefault((interest.subject, interest.queue), []).append(interest)
                else:
                    plain.append(interest)
        chosen = plain + [group[next(self._turns) % len(group)] for group in groups.values()]
        for interest in chosen:
            interest.take(message)
        return len(chosen)

    def stream(self, name: str) -> MemoryStream:
        """The stream of this name, made again by its rules if it was wiped. Raises StreamMissing."""
        if name not in self.streams:
            self.add_stream(spec_of_stream(name))
        return self.streams[name]

    def add_stream(self, spec: StreamSpec) -> None:
        """Make the stream, or change its limits."""
        if spec.name in self.streams:
            self.streams[spec.name].spec = spec
        else:
            self.streams[spec.name] = MemoryStream(spec, self.monotonic, self._dead)

    def _dead(self, stream: str, payload: bytes, subject: str) -> None:
        """A message was delivered max_deliver times: as `DeadLetters` does over NATS."""
        handlers = [each for each in self.dead_letter_handlers.get(stream, []) if each[0].is_connected]
        if not handlers:
            return
        bus, handler = handlers[next(self._turns) % len(handlers)]
        bus.counts["dead_letter"] += 1
        self.stream(spec_behind(dead_subject(stream)).name).store(dead_subject(stream), payload, NO_HEADERS, "")
        bus.spawn(handler(payload, subject))


class MemoryBus(Bus):
    """One process's connection to a MemoryBroker."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.clock = LinkClock(broker.monotonic)
        self.counts: Counter[str] = Counter()
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self._broker = broker
        self._is_cut = False
        self._is_closed = False
        self._inboxes = itertools.count()
        self._removers: list[Callable[[], None]] = []
        self._inbound: list[Inbound] = []
        self._consumers: list[MemoryConsumer] = []
        self._up: list[Callable[[], None]] = []
        self._closed: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Future[None]] = set()

    # -- faults to play -------------------------------------------------------------------------------------------
    def cut(self) -> None:
        """The connection is lost."""
        self._is_cut = True
        self.clock.link_down()
        self.counts["disconnect"] += 1

    def mend(self) -> None:
        """The connection is back."""
        self._is_cut = False
        self.clock.link_up()
        self.counts["reconnect"] += 1
        for callback in self._up:
            callback()

    def break_off(self) -> None:
        """The connection is closed for good by the other side."""
        self._is_closed = True
        for inbound in self._inbound:
            inbound.fail(BusClosed("the connection was closed for good"))
        for callback in self._closed:
            callback()

    # -- the contract ---------------------------------------------------------------------------------------------
    @property
    def is_connected(self) -> bool:
        return not self._is_cut and not self._is_closed

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None) -> None:
        self._check(payload, headers)
        if self._is_cut:
            self.counts["publish_dropped"] += 1
            return
        self._broker.deliver(_message(subject, payload, reply, headers))

    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        try:
            async with asyncio.timeout(timeout_s):
                async for message in self.request_many(subject, payload, stall_s=timeout_s, headers=headers):
                    return message
        except TimeoutError:
            pass
        raise LinkDown(subject, timeout_s) if self._is_cut else BusTimeout(subject, timeout_s)

    async def request_many(self, subject: str, payload: bytes, *, stall_s: float, headers: Headers | None = None) -> AsyncIterator[Message]:
        self._check(payload, headers)
        await self._wait_connected(subject, stall_s)
        inbox = f"_INBOX_MEMORY.{id(self):x}.{next(self._inboxes)}"
        replies: asyncio.Queue[Message] = asyncio.Queue()
        remove = self._broker.add(_Interest(self, inbox, "", replies.put_nowait))
        try:
            if not self._broker.deliver(_message(subject, payload, inbox, headers)):
                raise NoResponders(subject)
            while True:
                try:
                    reply = await asyncio.wait_for(replies.get(), stall_s)
                except TimeoutError:
                    raise BusTimeout(subject, stall_s) from None
                yield reply
                if not reply.payload:
                    return
        finally:
            remove()

    async def subscribe(self, subject: str, *, queue: str = "", max_messages: int = 65_536, max_bytes: int = 64 * 2**20) -> Subscription:
        self._check(b"", None)
        inbound = Inbound(max_messages, max_bytes, self._count_drop)
        remove = self._broker.add(_Interest(self, subject, queue, inbound.push))

        async def stop() -> None:
            remove()

        inbound.stop = stop
        self._inbound.append(inbound)
        return inbound

    async def serve(self, subject: str, handler: Handler, *, queue: str = "", concurrency: int = 256) -> Subscription:
        self._check(b"", None)
        responder = Responder(handler, self.publish, concurrency, self.counts)
        remove = self._broker.add(_Interest(self, subject, queue, responder.take))
        self._removers.append(remove)

        async def stop() -> None:
            remove()

        responder.stop = stop
        return responder

    async def enqueue(self, subject: str, payload: bytes, *, msg_id: str, headers: Headers | None = None) -> bool:
        self._check(payload, headers)
        await self._wait_connected(subject, 5.0)
        stream = self._broker.stream(spec_behind(subject).name)
        return stream.store(subject, payload, dict(_message(subject, payload, "", headers).headers), msg_id)

    async def consume(self, stream: str, durable: str, subject: str, *, window: int, max_deliver: int | None = None) -> Consumer:
        self._check(b"", None)
        self._broker.stream(stream)
        consumer = MemoryConsumer(self, lambda: self._broker.stream(stream), subject, consumer_spec(stream, max_deliver))
        self._consumers.append(consumer)
        return consumer

    async def delete_durable(self, stream: str, durable: str, purge_subject: str = "") -> None:
        self._check(b"", None)
        found = self._broker.streams.get(stream)
        if found is not None:
            found.purge(purge_subject)

    async def on_dead_letter(self, stream: str, callback: DeadLetterHandler) -> None:
        self._broker.dead_letter_handlers.setdefault(stream, []).append((self, callback))

    async def add_stream(self, spec: StreamSpec) -> None:
        self._check(b"", None)
        self._broker.add_stream(spec)

    async def bucket(self, name: str) -> Bucket:
        self._check(b"", None)
        spec = spec_of_bucket(name)
        return MemoryBucket(self, lambda: self._broker.stream(spec.name), f"$KV.{name}.")

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        self._up.append(callback)

    def on_closed(self, callback: Callable[[], None]) -> None:
        self._closed.append(callback)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for remove in self._removers:
            remove()
        for inbound in self._inbound:
            await inbound.close()
        for consumer in self._consumers:
            await consumer.close()
        for task in self._tasks:
            task.cancel()

    # -- for the parts --------------------------------------------------------------------------------------------
    def spawn(self, work: Awaitable[None]) -> None:
        """Run `work` beside everything else, until `close`."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def check_link(self, subject: str) -> None:
        """Raises LinkDown, BusClosed."""
        self._check(b"", None)
        if self._is_cut:
            raise LinkDown(subject)

    async def _wait_connected(self, subject: str, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._is_cut:
            if asyncio.get_running_loop().time() >= deadline:
                raise LinkDown(subject, timeout_s)
            await asyncio.sleep(0.01)
        self._check(b"", None)

    def _check(self, payload: bytes, headers: Headers | None) -> None:
        if self._is_closed:
            raise BusClosed("the bus is closed")
        check_size(payload, headers, self.max_message_bytes)

    def _count_drop(self) -> None:
        self.counts["message_dropped"] += 1


def _message(subject: str, payload: bytes, reply: str, headers: Headers | None) -> Message:
    lower = {name.lower(): value for name, value in headers.items()} if headers else NO_HEADERS
    return Message(subject, payload, reply, lower)
