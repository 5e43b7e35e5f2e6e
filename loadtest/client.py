"""A client of the HTTP API that measures: server-sent events over asyncio, a timestamp a token, connections kept open.

While a stream runs it only notes what arrived when; the bytes are parsed after the stream has ended, so that the measuring costs the
measured machine little.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

_CLOSED = "the connection closed before the response ended"
_CHUNKED = 2**62
"""Length of a response that tells none."""
_END_OF_CHUNKS = b"\r\n0\r\n\r\n"


class Outcome(msgspec.Struct, kw_only=True):
    """One request as its client saw it. Times are monotonic ns."""

    status: int = 0
    """HTTP status; 0: no answer at all."""
    error: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    token_times_ns: list[int] = []
    """When each event with text arrived."""
    text: str = ""
    finish_reason: str = ""
    usage: dict[str, Any] = {}
    headers: dict[str, str] = {}

    @property
    def is_ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def ttft_ms(self) -> float:
        """Request sent → first event with text. Only where there was one."""
        return (self.token_times_ns[0] - self.started_ns) / 1e6

    @property
    def e2e_ms(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e6

    @property
    def gaps_ms(self) -> list[float]:
        """Time between neighbouring tokens."""
        return [(after - before) / 1e6 for before, after in zip(self.token_times_ns, self.token_times_ns[1:], strict=False)]

    @property
    def num_tokens(self) -> int:
        """As the server counted them, else the events with text."""
        return int(self.usage.get("completion_tokens", len(self.token_times_ns)))


class Client:
    """Requests to one gateway. Several may run at once, each on a connection of its own; idle connections are used again."""

    def __init__(self, url: str, *, api_key: str = "", headers: Mapping[str, str] | None = None, timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._timeout_s = timeout_s
        own = {**({"authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in own.items())
        self._idle: list[_Connection] = []

    async def generate(self, path: str, body: Mapping[str, Any]) -> Outcome:
        """POST `body` (with or without `stream`). Faults are in the outcome, never raised."""
        request = self._request("POST", path, msgspec.json.encode(body))
        outcome = Outcome(started_ns=time.monotonic_ns())
        try:
            async with asyncio.timeout(self._timeout_s):
                outcome.started_ns, arrivals = await self._exchange(request)
        except (OSError, TimeoutError, EOFError, ValueError) as error:
            outcome.error = str(error) or type(error).__name__
            outcome.ended_ns = time.monotonic_ns()
            return outcome
        outcome.ended_ns = arrivals[-1][0]
        read_response(arrivals, outcome)
        return outcome

    async def get(self, path: str) -> Any:
        """The JSON at `path`. OSError or ValueError where there is none."""
        async with asyncio.timeout(self._timeout_s):
            _, arrivals = await self._exchange(self._request("GET", path, b""))
        return msgspec.json.decode(split_response(b"".join(part for _, part in arrivals))[2])

    async def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            await connection.close()
        self._idle.clear()

    def _request(self, verb: str, path: str, body: bytes) -> bytes:
        head = (
            f"{verb} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{self._headers}\r\n"
        )
        return head.encode() + body

    async def _exchange(self, request: bytes) -> tuple[int, list[tuple[int, bytes]]]:
        """Send, then note (time, bytes) until the response is whole. Returns the time of sending, and the notes."""
        while True:
            is_fresh = not self._idle
            connection = self._idle.pop() if self._idle else await _connect(self._host, self._port)
            started_ns = time.monotonic_ns()
            try:
                arrivals = await connection.exchange(request)
            except (ConnectionError, EOFError):
                connection.abort()
                if is_fresh:
                    raise
                continue  # the server closed an idle connection: that is no fault of this request
            except BaseException:
                connection.abort()
                raise
            self._idle.append(connection)
            return started_ns, arrivals


async def _connect(host: str, port: int) -> _Connection:
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port)
    return connection


class _Connection(asyncio.Protocol):
    """One exchange after the other. A protocol, as a stream's reader costs twice as much for each event."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._whole: asyncio.Future[None] | None = None
        self._closed = asyncio.get_running_loop().create_future()
        self._begin()

    def _begin(self) -> None:
        self._arrivals: list[tuple[int, bytes]] = []
        self._head, self._tail = b"", b""
        self._num_bytes, self._length = 0, -1

    async def exchange(self, request: bytes) -> list[tuple[int, bytes]]:
        """Send, then note (time, bytes) until the response is whole. EOFError: the connection closed before that."""
        if self._transport is None or self._closed.done():
            raise EOFError(_CLOSED)
        self._begin()
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._whole
        return self._arrivals

    async def close(self) -> None:
        self.abort()
        await self._closed

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- from the loop -----------------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self._arrivals.append((time.monotonic_ns(), data))
        self._num_bytes += len(data)
        if self._length < 0:
            self._read_head(data)
        if self._length == _CHUNKED:
            self._tail = (self._tail + data)[-len(_END_OF_CHUNKS) :] if len(data) < len(_END_OF_CHUNKS) else data
            is_whole = self._tail.endswith(_END_OF_CHUNKS)
        else:
            is_whole = 0 <= self._length <= self._num_bytes
        if is_whole and self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set_result(None)
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(exc or EOFError(_CLOSED))

    def _read_head(self, data: bytes) -> None:
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end >= 0:
            length = _content_length(self._head[:end])
            self._length = length + end + 4 if length >= 0 else _CHUNKED


def _content_length(head: bytes) -> int:
    """-1: chunked."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return -1


def split_response(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (lower case), body without chunk marks."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") == "chunked":
        body = b"".join(part for _, part in _chunks(body))
    return int(status_line.split()[1]), headers, body


def _chunks(body: bytes) -> list[tuple[int, bytes]]:
    """(offset of the chunk's end in `body`, data)."""
    chunks, at = [], 0
    while (mark := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:mark], 16)
        if size == 0:
            break
        chunks.append((mark + 2 + size, body[mark + 2 : mark + 2 + size]))
        at = mark + 4 + size
    return chunks


def read_response(arrivals: list[tuple[int, bytes]], outcome: Outcome) -> None:
    """Fill `outcome` from what arrived. An event's time is that of the read which brought its last byte."""
    raw = b"".join(part for _, part in arrivals)
    outcome.status, outcome.headers, body = split_response(raw)
    if outcome.headers.get("content-type", "").startswith("text/event-stream"):
        _read_events(arrivals, raw, outcome)
        return
    answer = msgspec.json.decode(body)
    if outcome.status != 200:
        outcome.error = str((answer.get("error") or {}).get("message", "refused"))
        return
    outcome.usage = answer.get("usage") or {}
    _take_choice(answer, outcome, outcome.ended_ns)


def _read_events(arrivals: list[tuple[int, bytes]], raw: bytes, outcome: Outcome) -> None:
    head_bytes = raw.index(b"\r\n\r\n") + 4
    ends = list(accumulate(len(part) for _, part in arrivals))
    read, pending = 0, b""
    for end, data in _chunks(raw[head_bytes:]):
        while ends[read] < head_bytes + end:
            read += 1
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            _take_event(event, outcome, arrivals[read][0])


def _take_event(event: bytes, outcome: Outcome, moment_ns: int) -> None:
    if not event.startswith(b"data:") or event.endswith(b"[DONE]"):
        return
    message = msgspec.json.decode(event[5:])
    if message.get("error"):
        outcome.error = str(message["error"].get("message", "error event"))
        return
    outcome.usage = message.get("usage") or outcome.usage
    _take_choice(message, outcome, moment_ns)


def _take_choice(message: dict[str, Any], outcome: Outcome, moment_ns: int) -> None:
    for choice in message.get("choices", []):
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or ""
        if text:
            outcome.text += text
            outcome.token_times_ns.append(moment_ns)
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
