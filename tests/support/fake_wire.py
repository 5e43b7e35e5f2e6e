"""A wire that goes nowhere: what was sent is kept, and the test answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from shared.bus.base import Headers, LinkClock, Message
from shared.bus.wire import Callback, Stop, Wire


class FakeWire(Wire):
    """`sent` has every message that left; `arrive` brings one."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = LinkClock(time.monotonic)
        self.inbox = "_INBOX.test"
        self.max_message_bytes = 1000
        self.sent: list[Message] = []
        self.listeners: dict[str, Callback] = {}
        self.on_send: Callable[[Message], None] = lambda message: None
        self._is_connected = True

    async def open(self, options: dict[str, Any]) -> None:
        pass

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    async def wait_connected(self, timeout_s: float) -> bool:
        return self._is_connected

    async def send(self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None) -> bool:
        if not self._is_connected:
            self.counts["publish_dropped"] += 1
            return False
        message = Message(subject, payload, reply, dict(headers or {}))
        self.sent.append(message)
        self.on_send(message)
        return True

    async def listen(self, subject: str, callback: Callback, queue: str = "") -> Stop:
        self.listeners[subject] = callback

        async def stop() -> None:
            self.listeners.pop(subject, None)

        return stop

    async def close(self) -> None:
        pass

    # -- what the test plays ------------------------------------------------------------------------------------------
    def arrive(self, to: str, message: Message) -> None:
        """Bring `message` to whoever listens on `to` (its subject may be another: that of a stream)."""
        for pattern, callback in list(self.listeners.items()):
            if pattern == to or (pattern.endswith(".*") and to.startswith(pattern[:-1])):
                callback(message)

    def go_down(self) -> None:
        self._is_connected = False
        self._tell(self._down)

    def come_up(self) -> None:
        self._is_connected = True
        self._tell(self._up)

    def end(self) -> None:
        self._is_connected = False
        self._tell(self._closed)

    def deny(self, text: str) -> None:
        self._note_denied(text)
