"""Server-sent events: a generation as it comes, written straight to the ASGI server. The hot loop of the HTTP door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.generation import Generation
from services.gateway.reply import Reply
from shared.errors import SlipstreamError

PING_S = 10.0
"""A comment keeps proxies from closing a stream that is silent for so long."""
PING = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"

Opened = contextlib.AbstractAsyncContextManager[Generation]


class Door(Protocol):
    """What a stream needs of the door that it goes through."""

    def reply(self, generation: Generation) -> Reply: ...

    def headers(self, generation: Generation) -> dict[str, str]:
        """Of the response, as far as they are known when it begins."""
        ...

    def refusal(self, error: SlipstreamError) -> Response:
        """The whole answer, if nothing was sent yet."""
        ...

    def shown(self, error: SlipstreamError) -> dict[str, Any]:
        """Counts an error, and gives what a client may see of it."""
        ...


class EventStream(Response):
    """The status waits for the first text, so that an early failure is a real HTTP error; after PING_S the stream begins anyway. A later
    failure is an error object; [DONE] ends every stream. A client that leaves ends the generation."""

    media_type = "text/event-stream"

    def __init__(self, opened: Opened, door: Door) -> None:
        self.status_code = 200
        self.background = None
        self._opened = opened
        self._door = door
        self._is_begun = False
        self._is_quiet = True
        """Nothing was written since the last look of `_ping`."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        end = DONE
        try:
            async with self._opened as generation:
                with leaving(receive, generation.close):
                    pinging = asyncio.ensure_future(self._ping(generation, send))
                    try:
                        end = await self._write(generation, send)
                    finally:
                        pinging.cancel()
        except SlipstreamError as error:
            if not self._is_begun:
                await self._door.refusal(error)(scope, receive, send)
                return
            end = b"data: " + msgspec.json.encode(self._door.shown(error)) + b"\n\n" + DONE
        await send({"type": "http.response.body", "body": end})

    async def _write(self, generation: Generation, send: Send) -> bytes:
        """Everything but the end, which is returned."""
        reply = self._door.reply(generation)
        async for pieces in generation.pieces():
            if not self._is_begun:
                await self._begin(generation, send)
            chunks: list[bytes] = []
            for piece in pieces:
                chunks += reply.chunks(piece)
            if chunks:
                self._is_quiet = False
                await send({"type": "http.response.body", "body": _events(chunks), "more_body": True})
        return _events(reply.last_chunks()) + DONE

    async def _begin(self, generation: Generation, send: Send) -> None:
        self._is_begun = True
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **self._door.headers(generation)})
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _ping(self, generation: Generation, send: Send) -> None:
        while True:
            self._is_quiet = True
            await asyncio.sleep(PING_S)
            if not self._is_begun:
                await self._begin(generation, send)
            if self._is_quiet:
                await send({"type": "http.response.body", "body": PING, "more_body": True})


def _events(chunks: list[bytes]) -> bytes:
    return b"data: " + b"\n\ndata: ".join(chunks) + b"\n\n" if chunks else b""


@contextlib.contextmanager
def leaving(receive: Receive, left: Callable[[], None]) -> Iterator[None]:
    """Inside, `left` is called when the client goes away. The request's body was read before."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        left()

    watching = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watching.cancel()
