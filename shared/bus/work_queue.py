"""Work queues over NATS: deliveries by a durable, kept in progress while they wait here."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from shared.bus.base import Consumer, Delivery, Message
from shared.bus.jetstream import JetStream
from shared.bus.pull import PullLoop
from shared.bus.spec import ConsumerSpec
from shared.bus.streams import IN_PROGRESS_S
from shared.bus.wire import Wire
from shared.errors import BusClosed, StreamMissing

ACK, IN_PROGRESS, TERM = b"+ACK", b"+WPI", b"+TERM"
NS = 1e9

RestoreStream = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class AckSubject:
    """What the reply subject of a delivered message tells."""

    num_delivered: int
    stream_sequence: int
    consumer_sequence: int
    stored_ns: int
    num_pending: int


def parse_ack_subject(reply: str) -> AckSubject | None:
    """`$JS.ACK.<stream>.<consumer>.<delivered>.<sequence>.<consumer sequence>.<ns>.<pending>`, or with domain and account before stream.

    None: not a message of a stream.
    """
    parts = reply.split(".")
    if len(parts) < 9 or parts[0] != "$JS" or parts[1] != "ACK":
        return None
    first = 4 if len(parts) == 9 else 6
    try:
        return AckSubject(*(int(part) for part in parts[first : first + 5]))
    except (ValueError, TypeError):
        return None


class ServerClock:
    """The server's wall clock, by our monotonic one: ages do not depend on the clock of this machine."""

    def __init__(self) -> None:
        self._offset_ns: int | None = None

    def set(self, rfc3339: str) -> None:
        """The server said that it is now `rfc3339`."""
        text = re.sub(r"(\.\d{6})\d*", r"\1", rfc3339).replace("Z", "+00:00")
        try:
            stamp = datetime.fromisoformat(text)
        except ValueError:
            return
        self._offset_ns = int(stamp.timestamp() * NS) - time.monotonic_ns()

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return time.time_ns() if self._offset_ns is None else time.monotonic_ns() + self._offset_ns


class NatsDelivery(Delivery):
    """One delivered message. Answers are core messages: while disconnected they are dropped, and the message comes again."""

    def __init__(self, message: Message, told: AckSubject, age_s: float, wire: Wire) -> None:
        self.message = message
        self.num_delivered = told.num_delivered
        self.stream_sequence = told.stream_sequence
        self.age_s = age_s
        self._wire = wire
        self._is_settled = False

    async def ack(self) -> None:
        await self._settle(ACK)

    async def term(self) -> None:
        await self._settle(TERM)

    async def in_progress(self) -> None:
        if not self._is_settled:
            await self._wire.send(self.message.reply, IN_PROGRESS)

    async def _settle(self, answer: bytes) -> None:
        if self._is_settled:
            return
        self._is_settled = await self._wire.send(self.message.reply, answer)


class WorkQueue(PullLoop[NatsDelivery], Consumer):
    """A durable of a work queue."""

    def __init__(
        self,
        wire: Wire,
        jetstream: JetStream,
        restore: RestoreStream,
        *,
        stream: str,
        durable: str,
        subject: str,
        window: int,
        spec: ConsumerSpec,
        inbox: str,
    ) -> None:
        super().__init__(wire, stream, window, inbox)
        self._jetstream = jetstream
        self._restore = restore
        self._durable = durable
        self._subject = subject
        self._spec = spec
        self._server_clock = ServerClock()
        self._refresh_at = 0.0
        self._has_existed = False

    async def next(self) -> Delivery:
        return await self.take()

    async def close(self, *, delete: bool = False) -> None:
        await self.shut()
        if delete:
            try:
                await self._jetstream.delete_consumer(self._stream, self._durable)
            except (StreamMissing, BusClosed):
                return

    async def prepare(self) -> str:
        try:
            info = await self._jetstream.put_durable(self._stream, self._durable, self._subject, self._spec)
        except StreamMissing:
            await self._restore(self._stream)
            info = await self._jetstream.put_durable(self._stream, self._durable, self._subject, self._spec)
            if self._has_existed:
                self._wire.counts["durable_restored"] += 1
        self._has_existed = True
        self._server_clock.set(info.ts)
        return self._durable

    def accept(self, message: Message) -> NatsDelivery | None:
        told = parse_ack_subject(message.reply)
        if told is None:
            return None
        age_s = max(self._server_clock.now_ns() - told.stored_ns, 0) / NS
        return NatsDelivery(message, told, age_s, self._wire)

    def tick(self) -> Awaitable[None] | None:
        now_s = asyncio.get_running_loop().time()
        if not self._ready or now_s < self._refresh_at:
            return None
        self._refresh_at = now_s + IN_PROGRESS_S
        return self._keep_alive()

    async def _keep_alive(self) -> None:
        for delivery in list(self._ready):
            await delivery.in_progress()
