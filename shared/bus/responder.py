"""Answers requests for `Bus.serve`: a task a request, bounded, errors as headers. The same for both buses."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from shared.bus.base import Handler, Headers, Message, Subscription
from shared.errors import BusError, PayloadTooLarge, SlipstreamError

log = logging.getLogger(__name__)

MAX_WAITING = 65_536
STOP_S = 5.0
"""How long `close` waits for handlers that run."""


class Publish(Protocol):
    """`Bus.publish`."""

    async def __call__(self, subject: str, payload: bytes, *, headers: Headers | None = None) -> None: ...


class Responder(Subscription):
    """At most `concurrency` handlers at once; further requests wait in order, further than MAX_WAITING are dropped."""

    def __init__(self, handler: Handler, publish: Publish, concurrency: int, counts: Counter[str]) -> None:
        self._handler = handler
        self._publish = publish
        self._concurrency = concurrency
        self._counts = counts
        self._waiting: deque[Message] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.stop: Callable[[], Awaitable[None]] | None = None

    def take(self, message: Message) -> None:
        """Begin on one request. A reply subject must be an inbox: we would publish with our own rights to any other.

        Without one nobody waits for an answer: the request is handled all the same, as releases and announcements are sent.
        """
        if message.reply and not message.reply.startswith("_INBOX"):
            self._counts["reply_refused"] += 1
            return
        if len(self._tasks) < self._concurrency:
            self._begin(message)
        elif len(self._waiting) < MAX_WAITING:
            self._waiting.append(message)
        else:
            self.num_dropped += 1
            self._counts["message_dropped"] += 1

    def __aiter__(self) -> AsyncIterator[Message]:
        raise TypeError("requests go to the handler; there is nothing to iterate over")

    async def close(self) -> None:
        """Unsubscribe, then let the handlers end, within STOP_S."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.stop is not None:
            await self.stop()
        tasks = self._tasks - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_S)
            for task in late:
                task.cancel()

    def _begin(self, message: Message) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._waiting and not task.cancelled():
            self._begin(self._waiting.popleft())

    async def _answer(self, message: Message) -> None:
        payload, headers = b"", None
        try:
            payload = await self._handler(message)
        except SlipstreamError as error:
            headers = error_headers(error)
        except Exception:
            log.exception("a handler of %s failed", message.subject)
            self._counts["handler_failed"] += 1
            headers = error_headers(SlipstreamError("internal error"))
        if not message.reply:
            return
        try:
            await self._publish(message.reply, payload, headers=headers)
        except PayloadTooLarge as error:
            log.error("the reply of %s is too large: %s", message.subject, error.message)
            await self._publish(message.reply, b"", headers=error_headers(error))
        except BusError as error:
            log.warning("no reply sent on %s: %s", message.subject, error.message)


def error_headers(error: SlipstreamError) -> Headers:
    """The services protocol's headers (the code is a number there); `Slipstream-Error` carries our own word."""
    return {
        "Nats-Service-Error": error.message,
        "Nats-Service-Error-Code": str(error.status),
        "Slipstream-Error": error.code,
    }
