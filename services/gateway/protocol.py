"""The wire below the HTTP door: uvicorn's protocol, with the limits that it does not have itself."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.gateway.reply import error_body
from shared.errors import BadRequest


def bounded_protocol(head_s: float, max_connections: int) -> type[HttpToolsProtocol]:
    """A connection is closed if a request's head is not whole `head_s` after it (or the connection) began, or if there are too many."""

    class BoundedProtocol(HttpToolsProtocol):
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                transport.close()
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget_head()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            self._expect_head()
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._forget_head()
            super().on_headers_complete()

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP is answered in the API's words too."""
            body = msgspec.json.encode(error_body(BadRequest("this is not a valid HTTP request")))
            head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
            self.transport.close()

        def _expect_head(self) -> None:
            self._forget_head()
            self._head_timer = self.loop.call_later(head_s, self.transport.close)

        def _forget_head(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return BoundedProtocol
