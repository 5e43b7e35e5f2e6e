"""What the NATS bus needs of a client library, so that only `nats` imports one: send, listen, and news about the link."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from shared.bus.base import Headers, LinkClock, Message
from shared.errors import PayloadTooLarge

log = logging.getLogger(__name__)

EVENTS = {
    "publish_dropped": "core messages not sent because the connection was down or stuck",
    "message_dropped": "messages that came faster than their subscriber took them",
    "permission_denied": "subjects that NATS refused to this user",
    "disconnect": "connections lost",
    "reconnect": "connections found again",
    "deaf": "connections cut by us because the server did not answer a ping",
    "client_error": "other errors that the NATS client reported",
    "callback_failed": "callbacks of ours that raised",
    "handler_failed": "request handlers that raised something else than a SlipstreamError",
    "reply_refused": "requests whose reply subject was no inbox",
    "enqueue_retry": "messages sent again to a stream that did not answer",
    "pull_lost": "pull requests that ended without a word",
    "stream_restored": "streams and buckets made again after a wipe",
    "durable_restored": "durables made again after a wipe or expiry",
    "watch_restarted": "watches begun again after a reconnect, gap or wipe",
    "dead_letter": "messages moved to the dead letters",
}
"""Every key of `Bus.counts`."""

NO_RESPONDERS = "503"
LOG_AGAIN_S = 30.0
_DENIED = re.compile(r'violation for (publish|subscription) to "([^"]+)"')

Callback = Callable[[Message], None]
Stop = Callable[[], Awaitable[None]]


class Wire(ABC):
    """One connection, core NATS only. Callbacks are plain functions, called one after the other as messages arrive."""

    inbox: str
    """Prefix of this connection's own reply subjects; nobody else has it."""
    max_message_bytes: int = 0
    clock: LinkClock
    last_error: Exception | None = None
    """What the client last complained of; while `open` goes on, why it does."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._up: list[Callable[[], None]] = []
        self._down: list[Callable[[], None]] = []
        self._closed: list[Callable[[], None]] = []
        self._denied: list[Callable[[str], None]] = []
        self.denied_subscriptions: set[str] = set()
        """Subjects that NATS refused to let us listen to, in lower case."""
        self._log_again_s = 0.0

    @abstractmethod
    async def open(self, options: dict[str, Any]) -> None:
        """Connect, for as long as it takes: the caller bounds it. `options` are those of the client (see `start`)."""

    @property
    @abstractmethod
    def is_connected(self) -> bool: ...

    @abstractmethod
    async def wait_connected(self, timeout_s: float) -> bool:
        """True as soon as the link is up; False after `timeout_s`. Raises BusClosed."""

    @abstractmethod
    async def send(self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None) -> bool:
        """Publish now, or drop, count and return False while the link is down. Raises PayloadTooLarge, BusClosed."""

    @abstractmethod
    async def listen(self, subject: str, callback: Callback, queue: str = "") -> Stop:
        """Call `callback` for each message until the returned function is awaited. Holds across reconnects."""

    @abstractmethod
    async def close(self) -> None:
        """Flush, then close, within a few seconds whatever the server does. Idempotent."""

    def on_up(self, callback: Callable[[], None]) -> Callable[[], None]:
        """The connection is back; subscriptions are in place again. Returns a function that forgets `callback`."""
        return _keep(self._up, callback)

    def on_down(self, callback: Callable[[], None]) -> Callable[[], None]:
        """The connection is lost: what is under way will get no answer. Returns a function that forgets `callback`."""
        return _keep(self._down, callback)

    def on_closed(self, callback: Callable[[], None]) -> Callable[[], None]:
        """The connection is lost for good, and not by `close`. Returns a function that forgets `callback`."""
        return _keep(self._closed, callback)

    def on_denied(self, callback: Callable[[str], None]) -> None:
        """NATS refused a publish to this subject (given in lower case)."""
        self._denied.append(callback)

    def _tell(self, callbacks: list[Callable[[], None]]) -> None:
        """Call each; one that raises is logged and counted, and stops nobody."""
        for callback in list(callbacks):
            try:
                callback()
            except Exception:
                self.counts["callback_failed"] += 1
                log.exception("a callback about the connection failed")

    def _note_denied(self, text: str) -> None:
        """NATS tells a denial on the side, not as an answer: find out whom it concerns."""
        self.counts["permission_denied"] += 1
        log.error("%s", text)
        denied = _DENIED.search(text.lower())
        if denied and denied[1] == "publish":
            self._tell([partial(callback, denied[2]) for callback in self._denied])
        elif denied:
            self.denied_subscriptions.add(denied[2])

    def _complain(self, error: Exception) -> None:
        """Count; log the first of a series, then one in LOG_AGAIN_S. Before the first connection the caller of `open` tells."""
        self.counts["client_error"] += 1
        now_s = time.monotonic()
        if self.max_message_bytes and now_s >= self._log_again_s:
            self._log_again_s = now_s + LOG_AGAIN_S
            log.warning("NATS: %s", str(error) or repr(error))


def _keep(callbacks: list[Callable[[], None]], callback: Callable[[], None]) -> Callable[[], None]:
    callbacks.append(callback)

    def forget() -> None:
        with contextlib.suppress(ValueError):  # forgotten already
            callbacks.remove(callback)

    return forget


def check_size(payload: bytes, headers: Headers | None, max_bytes: int) -> None:
    """Raises PayloadTooLarge. Headers count as they are written: a first line, then `name: value` lines and an empty one."""
    num_bytes = len(payload)
    if headers:
        num_bytes += 14 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
    if num_bytes > max_bytes:
        raise PayloadTooLarge(num_bytes, max_bytes)


def status_of(message: Message) -> str:
    """The status code of a message that the server itself sent ("503", "408", ...), else ""."""
    return "" if message.payload else message.headers.get("status", "")
