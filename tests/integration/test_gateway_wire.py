"""What clients do to a connection, on real sockets: nothing of it may hang, leak, or end in anything but a typed answer."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest

from services.gateway.service import HEAD_BYTES
from tests.support.door import CHAT, READ_S, TEXT, WRITE_S, Door, chat, text
from tests.support.http import one_reply, read_reply, request_bytes
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


def keeping(body: dict[str, Any]) -> bytes:
    """A request behind which others may follow on its connection."""
    return request_bytes("POST", TEXT, msgspec.json.encode(body), connection="keep-alive")


async def test_a_large_body_is_not_read_to_its_end(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 4194305"))
    assert b" 413 " in await reader.readline()
    writer.close()
    await door.is_unharmed()


async def test_a_request_that_does_not_come_to_its_end_is_given_up(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 100") + b'{"model":')
    assert b" 408 " in await reader.readline()
    writer.close()
    await door.is_unharmed()


@pytest.mark.parametrize("begun", [b"POST /v1/chat/completions HT", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(door: Door, begun: bytes) -> None:
    reader, writer = await door.web.connect()
    writer.write(begun)
    reply = await read_reply(reader)
    assert (reply.status, reply.error["code"]) == (408, "request_timeout")
    writer.close()


@pytest.mark.parametrize("idle", [b"", b"\r\n"])
@pytest.mark.parametrize("after_a_request", [False, True])
async def test_a_connection_on_which_nothing_begins_is_closed(door: Door, idle: bytes, after_a_request: bool) -> None:
    """A blank line is nothing; between two requests it must not undo the patience for the next."""
    reader, writer = await door.web.connect()
    if after_a_request:
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"}")
        idle = b"\r\n"
    writer.write(idle)
    assert await reader.read() == b""
    writer.close()


async def test_a_slow_head_does_not_cut_the_answer_before_it(door: Door) -> None:
    """The second request stops in its head while the first is still answered."""
    reader, writer = await door.web.connect()
    writer.write(keeping(text(max_tokens=int(READ_S * 1000), ignore_eos=True)) + b"POST /v1/comp")
    first = await one_reply(reader)
    assert first.json["usage"]["completion_tokens"] == READ_S * 1000
    second = await read_reply(reader)
    assert second.error["code"] == "request_timeout"
    writer.close()


@pytest.mark.parametrize("num_reads", [1, 200])
async def test_a_large_head_is_refused(door: Door, num_reads: int) -> None:
    """T40: whole, or in pieces that never come to an end."""
    before = door.telemetry.total("http_errors", code="head_too_large")
    reader, writer = await door.web.connect()
    line = b"x-many: " + b"y" * 1000 + b"\r\n"
    writer.write(b"GET /live HTTP/1.1\r\n" + (line * 64 + b"\r\n" if num_reads == 1 else b""))
    for _ in range(num_reads - 1):
        writer.write(line)
        await asyncio.sleep(0)
    reply = await read_reply(reader)
    assert (reply.status, reply.error["code"]) == (431, "head_too_large")
    assert str(HEAD_BYTES) in reply.error["message"]
    writer.close()
    assert door.telemetry.total("http_errors", code="head_too_large") == before + 1
    await door.is_unharmed()


async def test_what_follows_a_body_has_the_limit_of_a_head_too(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
    for _ in range(100):
        writer.write(b"x-trailer: " + b"y" * 10_000 + b"\r\n")
    reply = await read_reply(reader)
    assert reply.status == 431
    writer.close()
    await door.is_unharmed()


async def test_a_trailer_is_no_header(door: Door) -> None:
    """Whoever has read the headers before must not find others in them later."""
    reader, writer = await door.web.connect()
    body = msgspec.json.encode(text())
    writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\nX-Slipstream-Explain: 1\r\n\r\n" % (len(body), body))
    reply = await one_reply(reader)
    assert reply.status == 200
    assert "x-slipstream-explanation" not in reply.headers
    writer.close()


async def test_what_is_no_http_is_refused_in_the_apis_words(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(b"\x16\x03\x01 not http\r\n\r\n")
    reply = await read_reply(reader)
    assert (reply.status, reply.error["type"]) == (400, "invalid_request_error")
    writer.close()
    await door.is_unharmed()


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        _, writer = await door.web.connect()
        writer.write(request_bytes("POST", CHAT).replace(b"content-length: 0", b"content-length: 100") + b'{"model":')
        await writer.drain()
        writer.transport.abort()
    await door.is_unharmed()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def ask_for_much(door: Door, **fields: Any) -> socket.socket:
    """A connection that holds little, on which megabytes are on their way."""
    sock, loop = socket.socket(), asyncio.get_running_loop()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, (door.web.host, door.web.port))
    body = chat(n=8, logprobs=True, top_logprobs=20, ignore_eos=True, **fields)
    await loop.sock_sendall(sock, request_bytes("POST", CHAT, msgspec.json.encode(body)))
    return sock


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_dropped(door: Door, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """T26. Its request is cancelled, and others are served meanwhile."""
    before = door.telemetry.total("http_errors", code="slow_reader")
    sock = await ask_for_much(door, max_tokens=4000 if stream else 500, stream=stream)
    await until(lambda: door.worker.scheduler.running)
    await door.is_unharmed()
    await until(lambda: door.telemetry.total("http_errors", code="slow_reader") == before + 1)
    await door.is_left()
    assert [record.message for record in caplog.records if record.name == "services.gateway.protocol"] == [
        f"a client read nothing for {WRITE_S:g} s: its connection is closed"
    ]
    sock.close()


async def test_a_client_that_reads_slowly_is_not(door: Door) -> None:
    """It never waits for as long as the limit, but for longer in all."""
    sock, loop = await ask_for_much(door, max_tokens=500, stream=True), asyncio.get_running_loop()
    read = b""
    started_s = loop.time()
    while part := await loop.sock_recv(sock, 2**16):
        read = (read + part)[-20:]
        if loop.time() < started_s + 3 * WRITE_S:
            await asyncio.sleep(0.01)
    assert b"[DONE]" in read
    sock.close()
