"""Streams, consumers and buckets of the in-memory bus."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

from shared.bus.base import Bucket, Consumer, Delivery, Entry, Headers, Message
from shared.bus.bucket import check_key
from shared.bus.spec import ConsumerSpec, StreamSpec
from shared.bus.streams import subject_matches
from shared.errors import BusClosed, QueueFull, RevisionConflict

Dead = Callable[[str, bytes, str], None]
"""Called with stream, payload and subject."""

POLL_S = 0.02
"""How often a waiting consumer looks whether an ack_wait has passed."""


class Link(Protocol):
    """The bus that a consumer or bucket belongs to."""

    @property
    def is_connected(self) -> bool: ...

    def check_link(self, subject: str) -> None:
        """Raises LinkDown, BusClosed."""


@dataclass(slots=True)
class Stored:
    """One stored message, and how far its delivery is."""

    sequence: int
    message: Message
    stored_at: float
    num_delivered: int = 0
    due_at: float = 0.0
    """Not delivered before this time."""


@dataclass(slots=True)
class MemoryStream:
    """One stream or bucket."""

    spec: StreamSpec
    monotonic: Callable[[], float]
    dead: Dead
    messages: dict[int, Stored] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    is_gone: bool = False
    _last_sequence: int = 0
    _ids: dict[str, float] = field(default_factory=dict)

    def store(self, subject: str, payload: bytes, headers: Headers, msg_id: str) -> bool:
        """False: a message of this id was stored within the duplicate window. Raises QueueFull."""
        now = self.monotonic()
        self.expire()
        window_s = self.spec.duplicate_window_s
        if msg_id and window_s is not None:
            self._ids = {each: at for each, at in self._ids.items() if now < at + window_s}
            if msg_id in self._ids:
                return False
        self._make_room(subject, len(payload))
        self._last_sequence += 1
        self.messages[self._last_sequence] = Stored(self._last_sequence, Message(subject, payload, "", headers), now)
        if msg_id:
            self._ids[msg_id] = now
        self.wake()
        return True

    def put(self, subject: str, value: bytes | None) -> int:
        """Bucket: replace the last value of `subject`; None marks a deletion. Returns the revision."""
        for sequence in [each.sequence for each in self.messages.values() if each.message.subject == subject]:
            del self.messages[sequence]
        self._last_sequence += 1
        message = Message(subject, value or b"", "", {} if value is not None else {"kv-operation": "DEL"})
        self.messages[self._last_sequence] = Stored(self._last_sequence, message, self.monotonic())
        self.wake()
        return self._last_sequence

    def last(self, subject: str) -> Stored | None:
        self.expire()
        return next((each for each in self.messages.values() if each.message.subject == subject), None)

    def take_due(self, subject: str, spec: ConsumerSpec) -> Stored | None:
        """The first message that may be delivered now. What was delivered `max_deliver` times leaves as a dead letter."""
        now = self.monotonic()
        self.expire()
        for stored in list(self.messages.values()):
            if now < stored.due_at or not subject_matches(subject, stored.message.subject):
                continue
            if 0 <= spec.max_deliver <= stored.num_delivered:
                del self.messages[stored.sequence]
                self.dead(self.spec.name, stored.message.payload, stored.message.subject)
                continue
            stored.num_delivered += 1
            stored.due_at = now + spec.ack_wait_s
            return stored
        return None

    def free(self, subject: str) -> None:
        """The durable of `subject` is deleted: what it held unacked may be delivered at once."""
        for stored in self.messages.values():
            if subject_matches(subject, stored.message.subject):
                stored.due_at = 0.0

    def purge(self, subject: str) -> None:
        for sequence in [each.sequence for each in self.messages.values() if subject and subject_matches(subject, each.message.subject)]:
            del self.messages[sequence]

    def expire(self) -> None:
        """Drop what is older than max_age."""
        if self.spec.max_age_s is not None:
            oldest = self.monotonic() - self.spec.max_age_s
            for sequence in [each.sequence for each in self.messages.values() if each.stored_at < oldest]:
                del self.messages[sequence]

    def vanish(self) -> None:
        """The stream is wiped: whoever waits on it looks again."""
        self.is_gone = True
        self.messages.clear()
        self.wake()

    def wake(self) -> None:
        """Everybody who waits looks again."""
        self.news.set()
        self.news = asyncio.Event()

    def _make_room(self, subject: str, num_bytes: int) -> None:
        spec = self.spec
        of_subject = sum(each.message.subject == subject for each in self.messages.values())
        if spec.max_messages_per_subject is not None and of_subject >= spec.max_messages_per_subject:
            raise QueueFull(subject)
        while self.messages and self._is_over(num_bytes):
            if spec.discard == "new":
                raise QueueFull(subject)
            del self.messages[next(iter(self.messages))]

    def _is_over(self, num_bytes: int) -> bool:
        total = num_bytes + sum(len(each.message.payload) for each in self.messages.values())
        limit = self.spec.max_messages
        return total > self.spec.max_bytes or (limit is not None and len(self.messages) >= limit)


class MemoryDelivery(Delivery):
    """One delivered message. While the link is cut, answers are lost."""

    def __init__(self, stored: Stored, stream: MemoryStream, link: Link, spec: ConsumerSpec) -> None:
        self.message = stored.message
        self.num_delivered = stored.num_delivered
        self.stream_sequence = stored.sequence
        self.age_s = stream.monotonic() - stored.stored_at
        self._stored = stored
        self._stream = stream
        self._link = link
        self._spec = spec

    async def ack(self) -> None:
        if self._link.is_connected:
            self._stream.messages.pop(self.stream_sequence, None)

    async def term(self) -> None:
        await self.ack()

    async def in_progress(self) -> None:
        if self._link.is_connected:
            self._stored.due_at = self._stream.monotonic() + self._spec.ack_wait_s


class MemoryConsumer(Consumer):
    """A durable of a memory stream; messages leave the stream's hands only when `next` takes them."""

    def __init__(self, link: Link, stream: Callable[[], MemoryStream], subject: str, spec: ConsumerSpec) -> None:
        self._link = link
        self._stream = stream
        self._subject = subject
        self._spec = spec
        self._is_paused = False
        self._is_closed = False

    async def next(self) -> Delivery:
        while not self._is_closed:
            stream = self._stream()
            news = stream.news
            if self._link.is_connected and not self._is_paused:
                stored = stream.take_due(self._subject, self._spec)
                if stored is not None:
                    return MemoryDelivery(stored, stream, self._link, self._spec)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), POLL_S)
        raise BusClosed("the consumer is closed")

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._stream().wake()

    async def close(self, *, delete: bool = False) -> None:
        self._is_closed = True
        if delete:
            self._stream().free(self._subject)
        self._stream().wake()


class MemoryBucket(Bucket):
    """A bucket of the in-memory bus."""

    def __init__(self, link: Link, stream: Callable[[], MemoryStream], prefix: str) -> None:
        self._link = link
        self._stream = stream
        self._prefix = prefix

    async def get(self, key: str) -> Entry | None:
        stored = self._last(key)
        return None if stored is None else self._entry(stored)

    async def put(self, key: str, value: bytes) -> int:
        self._check(key)
        return self._stream().put(self._prefix + key, value)

    async def create(self, key: str, value: bytes) -> int:
        if self._last(key) is not None:
            raise RevisionConflict(key)
        return await self.put(key, value)

    async def update(self, key: str, value: bytes, revision: int) -> int:
        self._check(key)
        stored = self._stream().last(self._prefix + key)
        if (stored.sequence if stored else 0) != revision:
            raise RevisionConflict(key)
        return await self.put(key, value)

    async def delete(self, key: str) -> None:
        self._check(key)
        self._stream().put(self._prefix + key, None)

    async def entries(self) -> list[Entry]:
        self._link.check_link(self._prefix)
        stream = self._stream()
        stream.expire()
        return [entry for entry in map(self._entry, list(stream.messages.values())) if entry.value is not None]

    async def watch(self) -> AsyncIterator[Entry]:
        seen = 0
        watched: MemoryStream | None = None
        was_connected = True
        while True:
            stream = self._stream()
            if stream is not watched or (self._link.is_connected and not was_connected):
                watched, seen = stream, 0
            was_connected = self._link.is_connected
            news = stream.news
            fresh = [each for each in stream.messages.values() if each.sequence > seen] if was_connected else []
            for stored in fresh:
                seen = stored.sequence
                yield self._entry(stored)
            if not fresh:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), POLL_S)

    def _last(self, key: str) -> Stored | None:
        """The present value, not a mark of deletion."""
        self._check(key)
        stored = self._stream().last(self._prefix + key)
        return None if stored is None or stored.message.headers else stored

    def _check(self, key: str) -> None:
        check_key(key)
        self._link.check_link(self._prefix + key)

    def _entry(self, stored: Stored) -> Entry:
        value = None if stored.message.headers else stored.message.payload
        return Entry(stored.message.subject[len(self._prefix) :], value, stored.sequence)
