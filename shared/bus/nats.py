"""The connection to NATS: with `nats_client` the only importer of nats-py, whose traps end here. `connect` gives a whole bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Callable
from typing import Any

import nats.errors
import nats.js.errors

from shared.bus.base import Headers, LinkClock, Message
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_client import Sink, Transport, WritingClient
from shared.bus.start import START_S, inbox_prefix_of, open_bus
from shared.bus.watchdog import DEAF_S, Watchdog
from shared.bus.wire import Callback, Stop, Wire, check_size
from shared.config import ServiceConfig
from shared.errors import BusClosed, BusError, BusTimeout, LinkDown, NoResponders

log = logging.getLogger(__name__)

PATIENCE_S = 1.5
"""Without an answer for so long the link clock stops (before anybody's lease, heard at most 1 s earlier, is 3 s old)."""
CONNECT_S = 2.0
CLOSE_S = 2.0
FLUSH_S = 0.5
"""How long a publisher waits for a server that does not read, once MAX_UNSENT_BYTES wait for it; afterwards messages are dropped."""
MAX_UNSENT_BYTES = 4 * 2**20
"""What may wait for a server that does not read; beyond it messages are dropped."""

NO_HEADERS: Headers = {}

Translation = Callable[[str], BusError]


def _plain(reason: str) -> Translation:
    return lambda subject: BusError(f"NATS: {reason} ({subject})")


def _closed(_: str) -> BusError:
    return BusClosed("the connection to NATS is closed", remedy="start the process again")


_E = nats.errors
_MISUSE = (
    *(_E.BadSubjectError, _E.BadHeaderError, _E.BadSubscriptionError, _E.BadTimeoutError, _E.JsonParseError, _E.ProtocolError),
    *(_E.InvalidCallbackTypeError, _E.ServerNotInPoolError, _E.NotJSMessageError, _E.MsgAlreadyAckdError),
)
TRANSLATIONS: dict[type[Exception], Translation] = {
    _E.TimeoutError: lambda subject: BusTimeout(subject, 0.0),
    _E.NoRespondersError: NoResponders,
    _E.StaleConnectionError: LinkDown,
    _E.OutboundBufferLimitError: LinkDown,
    _E.ConnectionReconnectingError: LinkDown,
    _E.ConnectionClosedError: _closed,
    _E.ConnectionDrainingError: _closed,
    _E.NoServersError: _closed,
    _E.AuthorizationError: _plain("wrong user or password"),
    _E.InvalidUserCredentialsError: _plain("the credentials file is not valid"),
    _E.SecureConnRequiredError: _plain("the server wants TLS"),
    _E.SecureConnWantedError: _plain("the server has no TLS"),
    _E.SecureConnFailedError: _plain("TLS failed"),
    _E.MaxPayloadError: _plain("the message is larger than the server allows"),
    _E.SlowConsumerError: _plain("messages came faster than they were taken"),
    **dict.fromkeys(_MISUSE, _plain("the client refused")),
    nats.js.errors.Error: _plain("JetStream refused"),
    OSError: LinkDown,
}
"""nats-py's errors (a class stands for its subclasses) → ours, made with the subject. tests/unit/bus/test_nats.py shows it whole."""


def translate(error: Exception, subject: str) -> BusError:
    """The error of ours for one of nats-py's."""
    for cause in type(error).__mro__:
        if cause in TRANSLATIONS:
            return TRANSLATIONS[cause](subject)
    return BusError(f"NATS: {error!r} ({subject})")


class Connection(Wire):
    """One connection. Guarantees:

    1. It reconnects for ever; a deaf connection is found and cut within DEAF_S + PING_S, whatever state nats-py believes in.
    2. Nothing is sent late: what was not written when the link went is dropped and counted.
    3. No message larger than `max_message_bytes`, headers included, reaches the server (which would close the link for ever).
    4. Callbacks of ours that raise, and errors that nats-py reports, are counted and logged, and never end its read loop.
    """

    def __init__(self, inbox_prefix: str) -> None:
        super().__init__()
        self.clock = LinkClock(time.monotonic, patience_s=PATIENCE_S)
        self.inbox = f"{inbox_prefix}.{secrets.token_hex(8)}"
        self._client = WritingClient()
        self._client._transport = Transport()
        self._is_up = asyncio.Event()
        self._is_stuck = False
        self._is_closing = False
        self._watchdog = Watchdog(self._ping, lambda: self.is_connected, self.clock.heard, self._cut)

    async def open(self, options: dict[str, Any]) -> None:
        try:
            await self._client.connect(
                **options,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                max_reconnect_attempts=-1,
                reconnect_time_wait=random.uniform(0.1, 0.3),
                connect_timeout=CONNECT_S,
                ping_interval=2,
                max_outstanding_pings=2,
            )
        except (nats.errors.Error, OSError) as error:
            raise translate(error, "connect") from error
        self.max_message_bytes = self._client.max_payload * 9 // 10
        self.clock.heard()
        self._is_up.set()
        self._watchdog.start()

    @property
    def is_connected(self) -> bool:
        return self._is_up.is_set() and bool(self._client.is_connected)

    async def wait_connected(self, timeout_s: float) -> bool:
        self._refuse_closed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_up.wait()
        self._refuse_closed()
        return self.is_connected

    async def send(self, subject: str, payload: bytes, reply: str = "", headers: Headers | None = None) -> bool:
        check_size(payload, headers, self.max_message_bytes)
        self._refuse_closed()
        if not self.is_connected or not await self._has_room():
            self.counts["publish_dropped"] += 1
            return False
        try:
            await self._client.publish(subject, payload, reply, headers or None)
        except (nats.errors.Error, OSError) as error:
            raise translate(error, subject) from error
        return True

    async def listen(self, subject: str, callback: Callback, queue: str = "") -> Stop:
        self._refuse_closed()

        def take(message: Any) -> None:
            headers = {name.lower(): value for name, value in message.headers.items()} if message.headers else NO_HEADERS
            try:
                callback(Message(message.subject, message.data, message.reply, headers))
            except Exception:
                self.counts["callback_failed"] += 1
                log.exception("a subscriber of %s failed", subject)

        try:
            subscription = await self._client.subscribe(subject, queue, future=Sink(take))
        except nats.errors.Error as error:
            raise translate(error, subject) from error

        async def stop() -> None:
            with contextlib.suppress(nats.errors.Error):  # closed already
                await subscription.unsubscribe()

        return stop

    async def close(self) -> None:
        """Our own order, each step bounded: nats-py's drain raises while disconnected and skips the close when its flush fails."""
        if self._is_closing:
            return
        self._is_closing = True
        self._is_up.clear()
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if self._client.is_connected:
                    await self._client.rtt(CLOSE_S)
        if self._client._flush_queue is None:
            return  # it refused its options
        with contextlib.suppress(nats.errors.Error, OSError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._client.close()
            self._client._transport.close()  # a client that was never greeted thinks that it is closed
            await asyncio.sleep(0)
        await self._watchdog.stop()

    # -- what nats-py tells ---------------------------------------------------------------------------------------
    async def _on_error(self, error: Exception) -> None:
        """Must not raise: it would end the read loop and leave the client deaf, yet `connected`."""
        self.last_error = error
        if "permissions violation" in str(error).lower():
            self._note_denied(str(error))
        elif not self._is_closing and not isinstance(error, nats.errors.StaleConnectionError):
            self._complain(error)

    async def _on_disconnected(self) -> None:
        if self._client.is_closed:
            return  # by us, or for good: `_on_closed` follows
        unsent = self._client._pending
        self.counts["publish_dropped"] += sum(command.startswith((b"PUB ", b"HPUB ")) for command in unsent)
        unsent.clear()  # or it would be sent after the reconnect
        self._client._pending_data_size = 0
        self._is_up.clear()
        self._is_stuck = False
        self.counts["disconnect"] += 1
        self.clock.link_down()
        log.warning("the connection to NATS is lost")
        self._tell(self._down)

    async def _on_reconnected(self) -> None:
        self._watchdog.forget()
        self._log_again_s = 0.0
        self._is_up.set()
        self.counts["reconnect"] += 1
        self.clock.link_up()
        log.info("connected to NATS again")
        self._tell(self._up)

    async def _on_closed(self) -> None:
        """By us, or for good: after a protocol error, a maximum exceeded, or an authorization that ended."""
        self._is_up.clear()
        await self._watchdog.stop()
        if self._is_closing:
            return
        self._is_closing = True
        log.critical("the connection to NATS is closed for good: %s", self._client.last_error)
        self._tell(self._closed)

    async def _ping(self) -> float:
        return float(await self._client.rtt(timeout=3600))

    async def _cut(self) -> None:
        self.counts["deaf"] += 1
        log.warning("NATS has not answered for %g s: connecting anew", DEAF_S)
        await self._client.force_reconnect()

    async def _has_room(self) -> bool:
        """Wait for a server that reads slowly; but once it has kept us waiting for FLUSH_S, no longer."""
        if self._client._transport.num_unsent_bytes <= MAX_UNSENT_BYTES:
            self._is_stuck = False
            return True
        if self._is_stuck:
            return False
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._client._transport.drain()
        except TimeoutError:
            self._is_stuck = True
        except OSError as error:
            log.info("the connection to NATS broke while it was waited for: %s", error)
        return self.is_connected and not self._is_stuck

    def _refuse_closed(self) -> None:
        if self._is_closing:
            raise _closed("")


async def connect(config: ServiceConfig, *, name: str, inbox_prefix: str | None = None, wait_s: float = START_S) -> NatsBus:
    """Connect as `config` says, and see that JetStream is there. Raises ConfigError, or EnvironmentFault after `wait_s` at the latest.

    `inbox_prefix` None: the one that the permissions of `nats_user` allow.
    """
    prefix = inbox_prefix or inbox_prefix_of(config.nats_user)
    return await open_bus(Connection(prefix), config, name=name, inbox_prefix=prefix, wait_s=wait_s)
