"""A stream as its client's side reads it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from services.gateway.sessions import MAX_TAKEN, Stream


async def test_what_has_gathered_is_taken_in_portions_between_which_others_run() -> None:
    session: Any = SimpleNamespace(output=list(range(10 * MAX_TAKEN + 1)), end=None)
    stream = Stream(session)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    portions = [await stream.next() for _ in range(11)]
    running.cancel()
    assert [len(portion) for portion in portions] == [MAX_TAKEN] * 10 + [1]
    assert [token for portion in portions for token in portion] == session.output
    assert turns >= 10


async def test_news_are_waited_for_and_the_end_is_empty() -> None:
    session: Any = SimpleNamespace(output=[], end=None)
    stream = Stream(session)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    session.output.append(7)
    stream.news.set()
    assert await waiting == [7]
    session.end = object()
    assert await stream.next() == []
