"""Server-sent events: a generation as it comes, written straight to the ASGI server. The hot loop of the HTTP door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.generation import Piece
from services.gateway.reply import Reply
from shared.errors import RequestCancelled, SlipstreamError

PING_S = 10.0
"""A comment keeps proxies from closing a stream that is silent for so long."""
PING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

ShowError = Callable[[SlipstreamError], dict[str, Any]]
"""Counts an error, and gives what a client may see of it."""


class EventStream(Response):
    """A failure after the first byte is an error object; [DONE] ends every stream. A client that leaves ends the generation.

    `stack` holds the generation: it is left when the stream ends, with the error if there was one.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        reply: Reply,
        first: asyncio.Task[Piece],
        pieces: AsyncIterator[Piece],
        stack: contextlib.AsyncExitStack,
        headers: dict[str, str],
        show_error: ShowError,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._reply = reply
        self._first = first
        self._pieces = pieces
        self._stack = stack
        self._show_error = show_error
        self._is_quiet = True
        """Nothing was written since the last look of `_ping`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        watching = asyncio.ensure_future(_disconnected(receive))
        pinging = asyncio.ensure_future(self._ping(send))
        error: BaseException | None = None
        try:
            await asyncio.wait([writing, watching], return_when=asyncio.FIRST_COMPLETED)
            error = writing.result() if writing.done() else RequestCancelled("the client went away")
        except BaseException as raised:
            error = raised
            raise
        finally:
            for task in (writing, watching, pinging, self._first):
                task.cancel()
            await asyncio.gather(writing, watching, pinging, self._first, return_exceptions=True)
            with contextlib.suppress(RequestCancelled, SlipstreamError):
                await self._stack.__aexit__(type(error) if error else None, error, error.__traceback__ if error else None)

    async def _write(self, send: Send) -> SlipstreamError | None:
        """Everything, from the status line on. Returns the error that ended the stream, if one did."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        encode, chunks_of = msgspec.json.encode, self._reply.chunks
        failure: SlipstreamError | None = None
        end = DONE
        try:
            await self._send(send, [encode(chunk) for chunk in chunks_of(await self._first)])
            async for piece in self._pieces:
                await self._send(send, [encode(chunk) for chunk in chunks_of(piece)])
            await self._send(send, [encode(chunk) for chunk in self._reply.last_chunks()])
        except SlipstreamError as error:
            failure = error
            end = b"data: " + encode(self._show_error(error)) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": end})
        return failure

    async def _send(self, send: Send, chunks: list[bytes]) -> None:
        if chunks:
            self._is_quiet = False
            body = b"data: " + b"\n\ndata: ".join(chunks) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _ping(self, send: Send) -> None:
        while True:
            self._is_quiet = True
            await asyncio.sleep(PING_S)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
