"""A bus inside one process with core messages only: what a store and its clients need of a broker, without one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from shared.bus.base import Handler, LinkClock, Message, Subscription
from shared.errors import BusTimeout, NoResponders


class LocalSubscription(Subscription):
    """Answers one subject until it is closed."""

    def __init__(self, bus: LocalBus, subject: str) -> None:
        self._bus = bus
        self._subject = subject

    def __aiter__(self) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        self._bus.handlers.pop(self._subject, None)


class LocalBus:
    """`mute` subjects are delivered to nobody, as if their process stood still. Published messages are kept in `published`."""

    def __init__(self) -> None:
        self.clock = LinkClock(time.monotonic)
        self.handlers: dict[str, Handler] = {}
        self.mute: set[str] = set()
        self.published: list[tuple[str, bytes]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    async def serve(self, subject: str, handler: Handler, *, queue: str = "", concurrency: int = 256) -> Subscription:
        self.handlers[subject] = handler
        return LocalSubscription(self, subject)

    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Any = None) -> Message:
        if subject in self.mute:
            raise BusTimeout(subject, timeout_s)
        if subject not in self.handlers:
            raise NoResponders(subject)
        answering = asyncio.ensure_future(self.handlers[subject](Message(subject, payload)))  # in order with what was published
        return Message(subject, await answering)

    async def publish(self, subject: str, payload: bytes, *, reply: str = "", headers: Any = None) -> None:
        self.published.append((subject, payload))
        if subject in self.handlers and subject not in self.mute:
            task = asyncio.ensure_future(self.handlers[subject](Message(subject, payload)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Until what was published has been handled."""
        while self._tasks:
            await asyncio.gather(*self._tasks)
