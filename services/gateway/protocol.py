"""The wire below the HTTP door: uvicorn's protocol, with the limits and the care for hostile clients that it does not have itself."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar, NamedTuple, NoReturn

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.gateway.reply import error_body
from shared.errors import BadRequest, HeadTooLarge, RequestError, SlowRequest

MAX_PIPELINED = 16
"""Requests that a client may send before the first of them is answered."""
FRAMING_BYTES = 2
"""Of a colon and a blank, or the end of a line."""
LINGER_S = 1.0
"""After a refusal, for the client to read it and close."""

log = logging.getLogger(__name__)


class WireLimits(NamedTuple):
    """What a client may have of a connection."""

    read_s: float
    """For a request's head to become whole."""
    write_s: float
    """For a client to take nothing of what waits for it."""
    head_bytes: int
    """A request's target, names and values; the same for what follows a body. What one read of the socket brings may come on top."""
    max_connections: int
    refused: Callable[[str], None]
    """Told the code of whatever is refused or cut off."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is refused is answered in the API's words, behind the answers that are under way, and ends the connection."""

    limits: ClassVar[WireLimits]

    _running: RequestResponseCycle | None = None
    """The request that is answered; `cycle` is the last that came."""
    _refusal: RequestError | None = None
    """Why nothing is read any more."""
    _is_in_head = False
    _num_bytes = 0
    """Read since a head, a body's part or a request was whole."""
    _plain_head = b""
    """Of a request that offered another protocol, the head without the offer."""
    _num_unsent = 0
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # `pause_writing` then tells of every client that does not take what it is sent
        if len(self.connections) > self.limits.max_connections:
            self.limits.refused("too_many_connections")
            transport.abort()
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_reader()
        self._abandon()
        super().connection_lost(exc)

    # -- reading ---------------------------------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._num_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._num_bytes > self.limits.head_bytes:
            self._refuse(self._too_large())
        elif self._reading is None and (self._running is None or self._running.response_complete):
            self._expect_head()  # something came between two requests, and uvicorn's patience for the next has ended with it

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or BadRequest("this is not a valid HTTP request"))
        except httptools.HttpParserUpgrade as offer:
            self.parser = httptools.HttpRequestParser(self)
            self._parse(self._plain_head + data[offer.args[0] :])

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(BadRequest(f"more than {MAX_PIPELINED} requests came before they could be answered"))
        self._is_in_head = True
        self._expect_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of a head. What stands behind a body is not taken for headers."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """From here on the door has a limit of its own, for the body."""
        self._forget_head()
        self._is_in_head = False
        self._num_bytes = 0
        head = [self.url, *(part for header in self.headers for part in header)]
        if sum(map(len, head)) + FRAMING_BYTES * len(head) > self.limits.head_bytes:
            self._stop(self._too_large())
        if self.parser.should_upgrade():
            self._decline_upgrade()
            return
        super().on_headers_complete()
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # whether a body follows a refusal, only the client knows

    def _decline_upgrade(self) -> None:
        """The parser takes what follows the head for the other protocol, even a body. So another parser is given the head without the
        offer, which HTTP clients for Java make with each of their requests."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._stop(BadRequest("this is no proxy"))
        first = b" ".join([method, self.url, b"HTTP/" + self.parser.get_http_version().encode()])
        kept = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self._plain_head = b"\r\n".join([first, *kept, b"", b""])

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        if not self.parser.should_upgrade():
            super().on_message_complete()

    # -- writing ---------------------------------------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_reader()

    def _watch_reader(self) -> None:
        self._num_unsent = self._unsent_bytes()
        self._writing = self.loop.call_later(self.limits.write_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self._unsent_bytes() < self._num_unsent:
            self._watch_reader()
            return
        log.warning("a client read nothing for %g s: its connection is closed", self.limits.write_s)
        self.limits.refused("slow_reader")
        self.transport.abort()

    def _unsent_bytes(self) -> int:
        """Here and in the kernel, which takes more only when a third of what it holds has been taken by the client."""
        in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def _forget_reader(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    # -- answering -------------------------------------------------------------------------------------------------------------
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refusal is not None and not self._is_answering():
            self._answer(self._refusal)

    def _is_answering(self) -> bool:
        """A request came whole, or was answered before it had, and its answer is not at its end."""
        running = self._running
        return running is not None and not running.response_complete and (running.response_started or not running.more_body)

    def _abandon(self) -> None:
        """Let the request that is answered know that nobody waits for it, though another may have come behind it."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.waiting_for_100_continue = False
            self._running.message_event.set()

    # -- refusing --------------------------------------------------------------------------------------------------------------
    def _stop(self, error: RequestError) -> NoReturn:
        """Out of a callback of the parser, which then ends with an error."""
        self._refusal = error
        raise error

    def _refuse(self, error: RequestError) -> None:
        self._refusal = error
        self._forget_head()
        self.limits.refused(error.code)
        if not self._is_answering():
            self._answer(error)

    def _answer(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        self._abandon()
        body = msgspec.json.encode(error_body(error))
        head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.write_eof()  # what still comes is read and dropped: to close now would reset the connection, and the answer with it
        self._reading = self.loop.call_later(LINGER_S, self.transport.close)

    def _too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"a request's head may have {self.limits.head_bytes} bytes")

    # -- the patience for a head -----------------------------------------------------------------------------------------------
    def _expect_head(self) -> None:
        self._forget_head()
        self._reading = self.loop.call_later(self.limits.read_s, self._give_up)

    def _give_up(self) -> None:
        if self._is_in_head:
            self._refuse(SlowRequest(f"the request's head did not come to its end within {self.limits.read_s:g} s"))
        else:
            self.transport.close()

    def _forget_head(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None


def bounded_protocol(limits: WireLimits) -> type[BoundedProtocol]:
    """The class that uvicorn makes its connections of."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})
