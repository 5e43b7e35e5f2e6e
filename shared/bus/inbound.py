"""A subscription's own queue, bounded; the same for both buses."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from shared.bus.base import Message, Subscription


class Inbound(Subscription):
    """Messages between the callback that brings them and the one task that iterates. Beyond its limits they are dropped and counted."""

    def __init__(self, max_messages: int, max_bytes: int, on_drop: Callable[[], None]) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._on_drop = on_drop
        self._pending: deque[Message] = deque()
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False
        self._error: Exception | None = None
        self.stop: Callable[[], Awaitable[None]] | None = None
        """Unsubscribes; set by the bus."""

    def push(self, message: Message) -> None:
        """Take one message in, or drop it."""
        if self._is_closed:
            return
        if len(self._pending) >= self._max_messages or self._num_bytes + len(message.payload) > self._max_bytes:
            self.num_dropped += 1
            self._on_drop()
            return
        self._pending.append(message)
        self._num_bytes += len(message.payload)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the iteration with `error`, after the messages that are here already."""
        self._error = error
        self._is_closed = True
        self._wake()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._is_closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        message = self._pending.popleft()
        self._num_bytes -= len(message.payload)
        return message

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        if self.stop is not None:
            await self.stop()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
