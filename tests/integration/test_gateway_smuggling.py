"""What one reader of HTTP takes for one request and another for two, and other doubtful HTTP: read in one way, or refused."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.gateway.protocol import MAX_PIPELINED
from tests.support.door import READ_S, TEXT, Door, text
from tests.support.http import Reply, one_reply, read_reply, request_bytes
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = msgspec.json.encode(text())
SIZE = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


def call(body: dict[str, Any], **headers: str) -> bytes:
    return request_bytes("POST", TEXT, msgspec.json.encode(body), **{"connection": "keep-alive", **headers})


async def answered(door: Door, data: bytes) -> Reply:
    """The first reply; nothing may come behind it."""
    reader, writer = await door.web.connect()
    writer.write(data)
    reply = await read_reply(reader)
    writer.close()
    return reply


DOUBTFUL = [
    POST + SIZE + CHUNKED + b"\r\n" + CHUNKS + LIVE,
    POST + CHUNKED + b"content-length: 4\r\n\r\n" + CHUNKS + LIVE,
    POST + SIZE + b"content-length: 3\r\n\r\n" + BODY,
    POST + SIZE + SIZE + b"\r\n" + BODY,
    POST + b"content-length: 3, 3\r\n\r\n{}\n",
    POST + b"content-length: +2\r\n\r\n{}",
    POST + b"content-length: -1\r\n\r\n{}",
    POST + b"content-length: 0x2\r\n\r\n{}",
    POST + b"content-length: %d\r\n\r\n{}" % (2**64 + 2),
    POST + b"content-length: " + b"9" * 5000 + b"\r\n\r\n{}",
    POST + b"content-length : 2\r\n\r\n{}",
    POST + b"transfer-encoding: xchunked\r\n\r\n" + CHUNKS,
    POST + b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKS,
    POST + b"transfer-encoding: identity\r\n\r\n" + CHUNKS,
    POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    *(POST + CHUNKED + b"\r\n" + size + b"\r\n{}\r\n0\r\n\r\n" for size in (b"-1", b"0x2", b"zz", b"2 ", b"10000000000000002", b"f" * 40)),
    POST + CHUNKED + b"\r\n2\r\n{}0\r\n\r\n",
    POST + CHUNKED + b"\r\n2\n{}\n0\n\n",
    b"GET /live HTTP/1.1\nhost: x\n\n",
    b"GET /live HTTP/1.1\r\nhost: x\rx-a: b\r\n\r\n",
    b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n",
    b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: b\0c\r\n\r\n",
    b"GET /li\0ve HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /l\xc3\xafve HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET live HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET http://other HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /live HTTP/9.9\r\nhost: x\r\n\r\n",
    b"CONNECT other:443 HTTP/1.1\r\nhost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("data", DOUBTFUL)
async def test_what_can_be_read_in_two_ways_is_refused(door: Door, data: bytes) -> None:
    reply = await answered(door, data)
    assert (reply.status, reply.error["code"], reply.headers["connection"]) == (400, "invalid_request", "close")
    assert len(door.gateway.sessions) == 0


async def test_a_body_within_codings_is_refused(door: Door) -> None:
    """As nothing here would take them off."""
    reply = await answered(door, POST + b"connection: close\r\ntransfer-encoding: gzip, chunked\r\n\r\n" + CHUNKS)
    assert (reply.status, reply.error["code"]) == (415, "unsupported_content_type")


async def test_pipelined_requests_are_answered_in_their_order(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(call(text(max_tokens=40, ignore_eos=True)) + LIVE + call(text(max_tokens=2, ignore_eos=True)))
    replies = [await one_reply(reader) for _ in range(3)]
    assert [reply.status for reply in replies] == [200, 200, 200]
    assert [reply.json.get("usage", {}).get("completion_tokens") for reply in replies] == [40, None, 2]
    writer.close()


@pytest.mark.parametrize("behind", [b"\x00junk\r\n\r\n", LIVE * 1000])
async def test_what_is_refused_waits_for_the_answers_before_it(door: Door, behind: bytes) -> None:
    reader, writer = await door.web.connect()
    writer.write(call(text(max_tokens=40, ignore_eos=True)) + behind)
    assert (await one_reply(reader)).json["usage"]["completion_tokens"] == 40
    rest = (await reader.read()).split(b"HTTP/1.1 ")[1:]
    assert all(reply.startswith(b"200 ") for reply in rest[:-1])
    assert rest[-1].startswith(b"400 ")
    assert len(rest) <= MAX_PIPELINED + 1
    writer.close()


async def test_a_client_that_leaves_with_more_behind_its_request_cancels_it(door: Door) -> None:
    reader, writer = await door.web.connect()
    writer.write(call(text(max_tokens=4000, ignore_eos=True, stream=True)) + LIVE)
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    await door.is_left()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_declined(door: Door, protocol: str) -> None:
    """The request is answered as if there had been none, with its body, and so is the next."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": protocol, "http2_settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    reader, writer = await door.web.connect()
    for num_tokens in (2, 3):
        writer.write(call(text(max_tokens=num_tokens, ignore_eos=True), **offer))
        reply = await one_reply(reader)
        assert (reply.status, reply.json.get("usage", {}).get("completion_tokens")) == (200, num_tokens)
    head, body = call(text(), **offer).split(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n" + body[:5])
    await asyncio.sleep(0)
    writer.write(body[5:])
    assert (await one_reply(reader)).json["usage"]["completion_tokens"] == 3
    writer.close()


async def test_who_asks_before_a_body_is_told_to_go_on_or_refused(door: Door) -> None:
    reader, writer = await door.web.connect()
    head, body = call(text(), expect="100-continue").split(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await read_reply(reader)).status == 200
    writer.close()
    refused = await answered(door, request_bytes("POST", TEXT, expect="100-continue", content_length="9999999", connection="keep-alive"))
    assert (refused.status, refused.headers["connection"]) == (413, "close")


@pytest.mark.parametrize("host", ["[::1", "a/b?c#d", "\xff", "x:99999999"])
async def test_a_host_that_is_none_changes_nothing(door: Door, host: str) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", TEXT, 405), ("GET", "/live/", 404), ("POST", "/rerank", 501)):
        reply = await door.web.send(method, path, host=host)
        assert (reply.status, bool(reply.error["message"])) == (status, True)
        assert "location" not in reply.headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("HEAD", "/live", 200), ("HEAD", "/v1/models", 200), ("HEAD", "/nowhere", 404), ("HEAD", TEXT, 405),
        ("OPTIONS", "*", 404), ("OPTIONS", TEXT, 405), ("TRACE", "/live", 405), ("DELETE", f"/v1/models/{MODEL}", 405),
        ("GET", "http://other/live", 200), ("GET", "/%00%ff%zz", 404), ("GET", "//live", 404), ("GET", "/v1/models/../../etc", 404),
    ],
)  # fmt: skip
async def test_every_method_and_target_has_an_answer(door: Door, method: str, path: str, status: int) -> None:
    reply = await door.web.send(method, path)
    assert reply.status == status
    assert reply.body == b"" if method == "HEAD" else reply.json


async def test_a_client_that_closes_its_half_has_left(door: Door) -> None:
    """It cannot be told from one that closed both, and nobody computes for those."""
    reader, writer = await door.web.connect()
    writer.write(call(text(max_tokens=4000, ignore_eos=True)))
    await until(lambda: door.worker.scheduler.running)
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), READ_S) == b""
    await door.is_left()
    writer.close()
