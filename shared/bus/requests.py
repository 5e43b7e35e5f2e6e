"""Request-reply over one wildcard inbox. Unlike nats-py's own, what is under way fails at once when the link goes or NATS denies it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from shared.bus.base import Headers, Message
from shared.bus.wire import NO_RESPONDERS, Wire, status_of
from shared.errors import BusClosed, BusError, BusTimeout, LinkDown, NoResponders, PermissionDenied


class _Call:
    """A request under way: its replies, or the error that ends it."""

    __slots__ = ("error", "replies", "subject", "waiter")

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self.replies: list[Message] = []
        self.error: BusError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, message: Message) -> None:
        self.replies.append(message)
        self._wake()

    def fail(self, error: BusError) -> None:
        self.error = error
        self._wake()

    async def next(self, timeout_s: float) -> Message:
        """The next reply. Raises the call's error, or BusTimeout."""
        if not self.replies and self.error is None:
            loop = asyncio.get_running_loop()
            self.waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self.waiter
            finally:
                timer.cancel()
                self.waiter = None
        if self.replies:
            return self.replies.pop(0)
        raise self.error or BusTimeout(self.subject, timeout_s)

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Requests:
    """All requests of one connection."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._prefix = f"{wire.inbox}.r."
        self._calls: dict[str, _Call] = {}
        self._tokens = itertools.count()

    async def open(self) -> None:
        """Listen for replies; once, before the first request."""
        await self._wire.listen(self._prefix + "*", self._take)
        self._wire.on_down(self._link_down)
        self._wire.on_denied(self._denied)

    async def one(self, subject: str, payload: bytes, *, timeout_s: float, headers: Headers | None = None) -> Message:
        """The first reply. While the link is down it waits for it, within `timeout_s`.

        Raises NoResponders, BusTimeout, LinkDown, PermissionDenied, PayloadTooLarge, BusClosed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        token, call = self._open_call(subject)
        try:
            await self._send(token, subject, payload, headers, timeout_s)
            reply = await call.next(deadline - loop.time())
        except BusTimeout as error:
            error.timeout_s = timeout_s
            raise
        finally:
            del self._calls[token]
        if status_of(reply) == NO_RESPONDERS:
            raise NoResponders(subject)
        return reply

    async def many(self, subject: str, payload: bytes, *, stall_s: float, headers: Headers | None = None) -> AsyncIterator[Message]:
        """Replies until an empty payload, which is yielded too. Raises as `one`; BusTimeout after `stall_s` of silence."""
        token, call = self._open_call(subject)
        try:
            await self._send(token, subject, payload, headers, stall_s)
            while True:
                reply = await call.next(stall_s)
                if status_of(reply) == NO_RESPONDERS:
                    raise NoResponders(subject)
                yield reply
                if not reply.payload:
                    return
        finally:
            del self._calls[token]

    async def confirm(self, timeout_s: float = 2.0) -> None:
        """Return when the server has done all that was sent before: a message to ourselves. Raises as `one`."""
        token, call = self._open_call(self._prefix)
        call.subject += token
        try:
            await self._send(token, call.subject, b"", None, timeout_s)
            await call.next(timeout_s)
        finally:
            del self._calls[token]

    def close(self) -> None:
        """Whatever is under way ends with BusClosed."""
        for call in self._calls.values():
            call.fail(BusClosed("the connection to NATS is closed"))

    def _open_call(self, subject: str) -> tuple[str, _Call]:
        token = f"{next(self._tokens):x}"
        call = self._calls[token] = _Call(subject)
        return token, call

    async def _send(self, token: str, subject: str, payload: bytes, headers: Headers | None, timeout_s: float) -> None:
        is_up = self._wire.is_connected or await self._wire.wait_connected(timeout_s)
        if not is_up or not await self._wire.send(subject, payload, self._prefix + token, headers):
            raise LinkDown(subject, timeout_s)

    def _take(self, message: Message) -> None:
        call = self._calls.get(message.subject[len(self._prefix) :])
        if call is not None:
            call.put(message)

    def _link_down(self) -> None:
        for call in self._calls.values():
            call.fail(LinkDown(call.subject))

    def _denied(self, subject: str) -> None:
        for call in self._calls.values():
            if call.subject.lower() == subject:
                call.fail(PermissionDenied(call.subject))
