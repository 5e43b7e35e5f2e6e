"""Key-value buckets over NATS (a bucket is a stream `KV_<name>`): read, compare-and-set, and a watch that is never blind."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from shared.bus.base import Bucket, Entry, Headers, Message
from shared.bus.jetstream import ConsumerInfo, JetStream, PubAck
from shared.bus.pull import PullLoop
from shared.bus.streams import BUCKET_PREFIX
from shared.bus.wire import Wire
from shared.bus.work_queue import RestoreStream, parse_ack_subject
from shared.errors import BusError, BusTimeout, NoResponders, RevisionConflict, StreamMissing

WATCH_WINDOW = 256
WATCH_INACTIVE_S = 15.0
PUT_TIMEOUT_S = 5.0
ATTEMPT_S = 1.0
RETRY_S = 0.1

_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")
_DELETED = {"DEL", "PURGE"}

T = TypeVar("T")


def check_key(key: str) -> None:
    """Raises ValueError for what cannot be a key: a bug in the caller."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} cannot be the key of a bucket")


class NatsBucket(Bucket):
    """One bucket. A missing stream is made again and the operation repeated."""

    def __init__(self, name: str, wire: Wire, jetstream: JetStream, restore: RestoreStream) -> None:
        self._stream = BUCKET_PREFIX + name
        self._prefix = f"$KV.{name}."
        self._wire = wire
        self._jetstream = jetstream
        self._restore = restore

    async def get(self, key: str) -> Entry | None:
        entry = await self._last(key)
        return None if entry is None or entry.value is None else entry

    async def put(self, key: str, value: bytes) -> int:
        return await self._store(key, value, None)

    async def create(self, key: str, value: bytes) -> int:
        try:
            return await self._store(key, value, 0)
        except RevisionConflict:
            entry = await self._last(key)
            if entry is None or entry.value is not None:
                raise
            return await self._store(key, value, entry.revision)  # only the mark of its deletion is there

    async def update(self, key: str, value: bytes, revision: int) -> int:
        return await self._store(key, value, revision)

    async def delete(self, key: str) -> None:
        await self._store(key, b"", None, {"KV-Operation": "DEL"})

    async def entries(self) -> list[Entry]:
        watch = Watch(self._stream, self._prefix, self._wire, self._jetstream, self._restore)
        await watch.open()
        found: dict[str, Entry] = {}
        try:
            while not watch.is_complete:
                entry = await watch.take()
                found[entry.key] = entry
        finally:
            await watch.close()
        return [entry for entry in found.values() if entry.value is not None]

    async def watch(self) -> AsyncIterator[Entry]:
        watch = Watch(self._stream, self._prefix, self._wire, self._jetstream, self._restore)
        await watch.open(now=False)
        try:
            while True:
                yield await watch.take()
        finally:
            await watch.close()

    async def _last(self, key: str) -> Entry | None:
        """The last entry, marks of deletion included (value None)."""
        check_key(key)
        message = await self._with_stream(lambda: self._jetstream.last_message(self._stream, self._prefix + key))
        if message is None:
            return None
        return Entry(key, _value(message), int(message.headers.get("nats-sequence", "0")))

    async def _store(self, key: str, value: bytes, revision: int | None, headers: Headers | None = None) -> int:
        """Store, again and again for PUT_TIMEOUT_S. Raises RevisionConflict, QueueFull, BusTimeout."""
        check_key(key)
        sent = dict(headers or {})
        if revision is not None:
            sent["Nats-Expected-Last-Subject-Sequence"] = str(revision)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PUT_TIMEOUT_S
        is_repeated = False
        while True:
            try:
                return (await self._with_stream(lambda: self._publish(key, value, sent))).seq
            except RevisionConflict:
                entry = await self._last(key) if is_repeated else None
                if entry is None or entry.value != value:
                    raise RevisionConflict(key) from None
                return entry.revision  # an earlier attempt of ours was stored, only its answer was lost
            except (BusTimeout, NoResponders) as error:
                if loop.time() + RETRY_S >= deadline:
                    raise BusTimeout(self._prefix + key, PUT_TIMEOUT_S) from error
                is_repeated = True
                await asyncio.sleep(RETRY_S)

    async def _publish(self, key: str, value: bytes, headers: Headers) -> PubAck:
        return await self._jetstream.publish(self._prefix + key, value, headers=headers, timeout_s=ATTEMPT_S)

    async def _with_stream(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Once more after the stream was made again, if it is missing."""
        try:
            return await operation()
        except (NoResponders, StreamMissing):
            await self._restore(self._stream)
            return await operation()


class Watch(PullLoop[Entry]):
    """Every present key, then each change. A reconnect, a gap or a wiped bucket begins it again: all present keys are repeated."""

    def __init__(self, stream: str, prefix: str, wire: Wire, jetstream: JetStream, restore: RestoreStream) -> None:
        super().__init__(wire, stream, WATCH_WINDOW, f"{wire.inbox}.w{secrets.token_hex(4)}")
        self._prefix = prefix
        self._jetstream = jetstream
        self._restore = restore
        self._consumer = ""
        self._next_sequence = 1
        self._num_begun = 0
        self._is_listed = False

    @property
    def is_complete(self) -> bool:
        """Every key that was present at the beginning was taken."""
        return self._is_listed and not self._ready

    async def prepare(self) -> str:
        self._consumer = f"w{secrets.token_hex(6)}"
        self._next_sequence = 1
        self._num_begun += 1
        if self._num_begun > 1:
            self._wire.counts["watch_restarted"] += 1
        try:
            info = await self._begin()
        except StreamMissing:
            await self._restore(self._stream)
            info = await self._begin()
        self._is_listed = info.num_pending == 0
        return self._consumer

    def accept(self, message: Message) -> Entry | None:
        told = parse_ack_subject(message.reply)
        if told is None or f".{self._consumer}." not in message.reply:
            return None  # of a consumer that we gave up
        if told.consumer_sequence != self._next_sequence:
            self.lost()
            return None
        self._next_sequence += 1
        self._is_listed = self._is_listed or told.num_pending == 0
        return Entry(message.subject[len(self._prefix) :], _value(message), told.stream_sequence)

    async def close(self) -> None:
        """Stop, and delete the consumer if the server can be asked (else it expires)."""
        await self.shut()
        if self._wire.is_connected and self._consumer:
            try:
                await self._jetstream.delete_consumer(self._stream, self._consumer)
            except BusError:
                return

    async def _begin(self) -> ConsumerInfo:
        return await self._jetstream.put_watch(self._stream, self._consumer, self._prefix + ">", WATCH_INACTIVE_S)


def _value(message: Message) -> bytes | None:
    operation = message.headers.get("kv-operation", "")
    return None if operation in _DELETED or "nats-marker-reason" in message.headers else message.payload
