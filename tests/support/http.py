"""HTTP as bytes: requests that no client library would send, and replies as they came."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import msgspec


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The API's error object, checked for its shape."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The `data:` of a stream, decoded; `[DONE]` as it is."""
        frames = [frame[6:] for frame in self.body.split(b"\n\n") if frame.startswith(b"data: ")]
        return [frame.decode() if frame == b"[DONE]" else msgspec.json.decode(frame) for frame in frames]


class Web:
    """One server."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.host, self.port = host, int(port)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.host, self.port)

    async def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        """One request on a connection of its own."""
        reader, writer = await self.connect()
        writer.write(request_bytes(method, path, body, **headers))
        reply = await read_reply(reader)
        writer.close()
        await writer.wait_closed()
        return reply

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.send("POST", path, body if isinstance(body, bytes) else msgspec.json.encode(body), **headers)

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.send("GET", path, **headers)


def request_bytes(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """What stands in `headers` takes the place of what every request has; an empty value takes it away."""
    given = {"host": "test", "connection": "close", "content_length": str(len(body)), "content_type": "application/json", **headers}
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items() if value]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """The reply behind which the connection ends."""
    status, headers = await _read_head(reader)
    rest = await reader.read()
    return Reply(status, headers, _unchunk(rest) if headers.get("transfer-encoding") == "chunked" else rest)


async def one_reply(reader: asyncio.StreamReader) -> Reply:
    """A reply of known length, behind which others may follow."""
    status, headers = await _read_head(reader)
    return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await reader.readuntil(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").strip().split("\r\n")
    return int(status_line.split()[1]), {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _unchunk(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        whole, body = whole + body[:length], body[length + 2 :]
    return whole
