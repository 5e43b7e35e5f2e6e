"""What a work queue gave up on: told by an advisory, else it would lie in the stream unseen."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from shared.bus.base import DeadLetterHandler, Message
from shared.bus.jetstream import JetStream
from shared.bus.streams import dead_subject
from shared.bus.wire import Stop, Wire
from shared.errors import BusError

log = logging.getLogger(__name__)

ADVISORY = "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES"
QUEUE = "dead-letters"
"""Of all listeners, one takes care of a message."""

Enqueue = Callable[..., Awaitable[bool]]


class _Advisory(msgspec.Struct, frozen=True):
    stream: str
    consumer: str
    stream_seq: int
    deliveries: int


class DeadLetters:
    """Moves the dead letters of one stream to SS_DEAD, then tells its owner. A message that was acked meanwhile is left alone."""

    def __init__(self, stream: str, callback: DeadLetterHandler, wire: Wire, jetstream: JetStream, enqueue: Enqueue) -> None:
        self._stream = stream
        self._callback = callback
        self._wire = wire
        self._jetstream = jetstream
        self._enqueue = enqueue
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: Stop | None = None

    async def open(self) -> None:
        self._stop = await self._wire.listen(f"{ADVISORY}.{self._stream}.*", self._take, QUEUE)

    async def close(self) -> None:
        if self._stop is not None:
            await self._stop()
        for task in self._tasks:
            task.cancel()

    def _take(self, message: Message) -> None:
        try:
            advisory = msgspec.json.decode(message.payload, type=_Advisory)
        except msgspec.MsgspecError:
            log.warning("an advisory on %s that cannot be read", message.subject)
            return
        task = asyncio.get_running_loop().create_task(self._bury(advisory))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bury(self, advisory: _Advisory) -> None:
        try:
            found = await self._jetstream.message_at(self._stream, advisory.stream_seq)
            if found is None:
                return
            subject, payload = found
            headers = {"Slipstream-Subject": subject, "Slipstream-Deliveries": str(advisory.deliveries)}
            msg_id = f"{self._stream}:{advisory.stream_seq}:{subject}"
            await self._enqueue(dead_subject(self._stream), payload, msg_id=msg_id, headers=headers)
            await self._jetstream.delete_message(self._stream, advisory.stream_seq)
            self._wire.counts["dead_letter"] += 1
            log.error("%s gave up on message %d after %d deliveries", self._stream, advisory.stream_seq, advisory.deliveries)
            await self._callback(payload, subject)
        except BusError as error:
            log.warning("dead letter %d of %s: %s", advisory.stream_seq, self._stream, error.message)
        except Exception:
            self._wire.counts["callback_failed"] += 1
            log.exception("the owner of dead letters of %s failed", self._stream)
