from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from shared.worker.engine_thread import EngineThread


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    thread = EngineThread()
    yield thread
    thread.shut()
    assert not any(one.name == "engine" for one in threading.enumerate())


async def test_work_is_done_elsewhere_in_the_order_given(engine: EngineThread) -> None:
    seen: list[int] = []
    threads = await asyncio.gather(*(engine.run(lambda n=n: seen.append(n) or threading.get_ident()) for n in range(50)))  # type: ignore[misc]
    assert seen == list(range(50))
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_what_work_raises_is_its_callers_and_the_thread_goes_on(engine: EngineThread) -> None:
    with pytest.raises(ZeroDivisionError):
        await engine.run(lambda: 1 / 0)
    assert await engine.run(max, 1, 2) == 2


async def test_work_cancelled_before_its_turn_is_not_begun(engine: EngineThread) -> None:
    may_go, seen = threading.Event(), []
    first = engine.run(may_go.wait)
    second = engine.run(seen.append, 2)
    second.cancel()
    may_go.set()
    await first
    await engine.run(seen.append, 3)
    assert seen == [3]


async def test_work_cancelled_in_its_turn_is_done_to_its_end(engine: EngineThread) -> None:
    begun, may_go, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        may_go.wait()
        seen.append(1)

    working = engine.run(work)
    await asyncio.to_thread(begun.wait)
    working.cancel()
    may_go.set()
    await engine.run(int)
    assert seen == [1]


def test_an_unused_one_ends_too() -> None:
    thread = EngineThread()
    thread.shut()
