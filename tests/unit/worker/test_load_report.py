"""When a worker tells its load: twice a second, and soon after something has ended."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages.codec import decode
from shared.messages.fleet import EndedRequest, WorkerLoad
from shared.messages.subjects import Subjects
from shared.worker import load_report
from shared.worker.load_report import Ended, report_load

WORKER = "0a0a0a0a"


def describe(sequence: int, ended: list[EndedRequest]) -> WorkerLoad:
    return WorkerLoad(WORKER, "decode", "0" * 16, sequence, 0, 0, 0, 1, 0, ended=ended)


@pytest.fixture
async def loads() -> AsyncIterator[tuple[Ended, AsyncIterator[WorkerLoad]]]:
    bus, subjects, ended = MemoryBus(MemoryBroker()), Subjects(), Ended()
    subscription = await bus.subscribe(subjects.load_event("*"))

    async def read() -> AsyncIterator[WorkerLoad]:
        async for message in subscription:
            yield decode(WorkerLoad, message.payload)

    reporting = asyncio.create_task(report_load(bus, subjects, ended, describe))
    yield ended, read()
    reporting.cancel()
    await bus.close()


async def test_an_ended_request_is_told_without_waiting_for_the_next_report(
    loads: tuple[Ended, AsyncIterator[WorkerLoad]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_report, "EVERY_S", 3600.0)
    ended, reports = loads
    ended.add("0" * 31 + "1", 0)
    ended.add("0" * 31 + "2", 3)
    assert [request.epoch for request in (await anext(reports)).ended] == [0, 3]
    ended.add("0" * 31 + "3", 1)
    load = await anext(reports)
    assert ([request.epoch for request in load.ended], load.sequence) == ([1], 2), "each once"


async def test_without_an_end_the_load_is_told_all_the_same(loads: tuple[Ended, AsyncIterator[WorkerLoad]]) -> None:
    _, reports = loads
    assert (await anext(reports)).ended == []
