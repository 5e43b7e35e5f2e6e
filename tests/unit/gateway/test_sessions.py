"""A stream as its client's side reads it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.gateway.sessions import MAX_TAKEN, Stream


def session_with(output: list[int], num_logprobs: int = -1) -> Any:
    first = SimpleNamespace(sampling=SimpleNamespace(num_logprobs=num_logprobs))
    return SimpleNamespace(output=output, end=None, first=first)


@pytest.mark.parametrize(("num_logprobs", "portion"), [(-1, MAX_TAKEN), (0, MAX_TAKEN // 2), (20, 1)])
def test_what_has_gathered_is_taken_in_portions_smaller_with_logprobs(num_logprobs: int, portion: int) -> None:
    stream = Stream(session_with(list(range(3 * portion + 1)), num_logprobs))
    portions = []
    while stream.is_behind:
        portions.append(stream.take())
    assert [len(one) for one in portions] == [portion] * 3 + [1]
    assert [token for one in portions for token in one] == stream.session.output
    assert stream.take() == []


async def test_news_are_waited_for_and_the_end_is_empty() -> None:
    session = session_with([])
    stream = Stream(session)
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    session.output.append(7)
    stream.news.tell()
    assert await waiting == [7]
    session.end = object()
    assert await stream.next() == []
