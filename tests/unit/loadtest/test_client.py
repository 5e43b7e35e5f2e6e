"""The measuring client against a server that sends what it is told to, in pieces."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from loadtest.client import Client, Outcome, read_response

Pieces = list[bytes]
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str, finish: str = "null") -> bytes:
    return f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{finish}}}]}}\n\n'.encode()


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[list[Pieces]], Awaitable[str]]]:
    """Start a server that answers its n-th request with the n-th list of pieces; an empty list closes the connection."""
    servers: list[asyncio.Server] = []
    handlers: list[asyncio.Task[None] | None] = []

    async def start(answers: list[Pieces]) -> str:
        remaining = iter(answers)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b"":
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length[15:]))
                pieces = next(remaining)
                if not pieces:
                    break
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)

        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            handlers.append(asyncio.current_task())
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await answer(reader, writer)
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_server(guarded, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()
    await asyncio.gather(*(task for task in handlers if task))


async def test_a_stream_is_read_with_a_time_for_each_token(serve: Callable[[list[Pieces]], Awaitable[str]]) -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\ndata: [DONE]\n\n'
    url = await serve([[SSE, chunk(event("a")), chunk(event("b")), chunk(event("c", '"length"')), chunk(usage) + END]])
    client = Client(url)
    outcome = await client.generate("/v1/completions", {"stream": True})
    await client.close()
    assert (outcome.status, outcome.text, outcome.finish_reason, outcome.num_tokens) == (200, "abc", "length", 3)
    assert outcome.is_ok
    times = outcome.token_times_ns
    assert outcome.started_ns < times[0] < times[1] < times[2] <= outcome.ended_ns


async def test_events_split_and_glued_at_every_byte() -> None:
    raw = SSE + chunk(event("a")) + chunk(event("b")[:9]) + chunk(event("b")[9:] + event("c")) + END
    for cut in range(1, len(raw)):
        outcome = Outcome()
        read_response([(1, raw[:cut]), (2, raw[cut:])], outcome)
        assert outcome.text == "abc"
        assert outcome.token_times_ns == sorted(outcome.token_times_ns)


async def test_a_connection_is_used_again_and_a_closed_one_is_no_error(serve: Callable[[list[Pieces]], Awaitable[str]]) -> None:
    answer = [
        b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 46\r\n\r\n{"choices":[{"text":"x"}],"usage":{"total":1}}'
    ]
    url = await serve([answer, answer, [], answer])
    client = Client(url)
    outcomes = [await client.generate("/v1/completions", {}) for _ in range(3)]
    await client.close()
    assert [outcome.text for outcome in outcomes] == ["x", "x", "x"]


async def test_faults_are_in_the_outcome(serve: Callable[[list[Pieces]], Awaitable[str]]) -> None:
    refusal = b'{"error":{"message":"no such model"}}'
    head = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(refusal)
    broken = chunk(event("a")) + chunk(b'data: {"error":{"message":"worker_lost"}}\n\n') + END
    url = await serve([[head + refusal], [SSE + broken], []])
    client = Client(url)
    refused = await client.generate("/v1/completions", {})
    assert (refused.status, refused.error, refused.is_ok) == (404, "no such model", False)
    failed = await client.generate("/v1/completions", {})
    assert (failed.status, failed.error, failed.is_ok) == (200, "worker_lost", False)
    await client.close()
    gone = await client.generate("/v1/completions", {})
    assert gone.status == 0
    assert "closed" in gone.error
    await client.close()


async def test_nobody_there_is_an_outcome_too() -> None:
    outcome = await Client("http://127.0.0.1:1").generate("/v1/completions", {})
    assert outcome.status == 0
    assert outcome.error
