"""Clients that leave: what they asked for is cancelled, and nothing of it stays."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.door import TEXT, Door, text
from tests.support.http import request_bytes
from tests.support.waiting import until

pytestmark = [pytest.mark.timeout(60), pytest.mark.asyncio(loop_scope="module")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wait_for_text", [False, True])
async def test_a_client_that_leaves_frees_its_blocks(door: Door, stream: bool, wait_for_text: bool) -> None:
    reader, writer = await door.web.connect()
    body = msgspec.json.encode(text(max_tokens=4000, ignore_eos=True, stream=stream))
    writer.write(request_bytes("POST", TEXT, body))
    await until(lambda: door.worker.scheduler.running)
    if wait_for_text and stream:
        await reader.readuntil(b"data: ")
    writer.close()
    await door.is_left()


async def test_many_that_leave_do_not_keep_the_next_waiting(door: Door) -> None:
    """Two hundred long requests whose clients give up at once; then a short one must be answered."""
    writers = []
    for number in range(200):
        _, writer = await door.web.connect()
        writer.write(request_bytes("POST", TEXT, msgspec.json.encode(text(prompt=[3000 + number], max_tokens=4000, stream=True))))
        writers.append(writer)
    await until(lambda: len(door.gateway.sessions) == 200)
    for writer in writers:
        writer.close()
    reply = await door.web.post(TEXT, text(max_tokens=10))
    assert reply.status == 200
    await door.is_left()
