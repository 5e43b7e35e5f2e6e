"""Events are applied in slices: whatever waits has its turn between them, and what happens there is minded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router import sync
from services.router.index import STEP_BLOCKS, PrefixIndex
from services.router.source import Holder
from services.router.sync import IndexSync
from shared.bus.base import Message, Subscription
from shared.messages.codec import encode
from shared.messages.fleet import WorkerLease
from shared.messages.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEventBatch, KvSnapshot
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry

NAME = "aaaaaaaa"
PACKED = b"".join(number.to_bytes(16, "little") for number in range(1, 10 * STEP_BLOCKS + 8))
NUM_KEYS = len(PACKED) // 16


def stored(sequence: int, packed: bytes = PACKED, epoch: int = 1) -> KvEventBatch:
    return KvEventBatch(NAME, "worker", "", epoch, sequence, [BlocksStored("device", b"", packed)])


def begun() -> PrefixIndex:
    index = PrefixIndex()
    assert index.install(NAME, [KvSnapshot(NAME, 1, 0, [])])
    return index


def test_a_large_batch_takes_many_steps_and_comes_to_the_same() -> None:
    index, whole = begun(), begun()
    steps = index.applying(stored(1))
    sizes = [len(index) for _ in steps]
    assert sizes == [STEP_BLOCKS * number for number in range(1, 11)]
    assert whole.apply(stored(1))
    assert index.dump() == whole.dump()
    assert sum(1 for _ in index.applying(KvEventBatch(NAME, "worker", "", 1, 2, [BlocksRemoved("device", PACKED)]))) == 10
    assert len(index) == 0


def test_a_decision_may_come_between_the_events_of_a_batch() -> None:
    index = begun()
    some, more = PACKED[: 16 * 3], PACKED[16 * 3 : 16 * 8]
    batch = KvEventBatch(
        NAME, "worker", "", 1, 1, [BlocksStored("device", b"", some), BlocksRemoved("device", some), BlocksStored("device", b"", more)]
    )
    lengths = [len(index) for _ in index.applying(batch)]
    assert (lengths, len(index)) == ([3, 0], 5)


@pytest.mark.parametrize("how", ["dropped", "cleared", "begun anew"])
def test_what_goes_between_two_steps_does_not_come_back(how: str) -> None:
    index = begun()
    steps = index.applying(stored(1))
    next(steps)
    if how == "dropped":
        index.drop(NAME)
    elif how == "cleared":
        assert index.apply(KvEventBatch(NAME, "worker", "", 1, 2, [BlocksCleared()]))
    else:
        assert index.apply(stored(1, PACKED[:32], epoch=2))
    assert list(steps) == []
    assert len(index) == (2 if how == "begun anew" else 0)


def test_batches_that_come_during_an_install_are_applied_after_it() -> None:
    index = begun()
    steps = index.installing(NAME, [KvSnapshot(NAME, 1, 5, [BlocksStored("device", b"", PACKED)])])
    next(steps)
    assert not index.apply(KvEventBatch(NAME, "worker", "", 1, 6, [BlocksRemoved("device", PACKED[:16])]))
    assert index.state_of(NAME) == "DEGRADED"
    for _ in steps:
        pass
    assert index.state_of(NAME) == "EXACT"
    assert len(index) == NUM_KEYS - 1


def test_an_install_that_was_overtaken_by_a_new_life_ends() -> None:
    index = begun()
    steps = index.installing(NAME, [KvSnapshot(NAME, 1, 5, [BlocksStored("device", b"", PACKED)])])
    next(steps)
    assert index.apply(stored(1, PACKED[:16], epoch=2))
    assert list(steps) == []
    assert index.state_of(NAME) == "EXACT"
    assert index.overlap([PACKED[:16]]) == {Holder(NAME, "device"): 1}
    assert len(index) == 1


class Flood(Subscription):
    """Messages that are all here: taking the next one waits for nothing."""

    def __init__(self, payloads: list[bytes]) -> None:
        self.payloads = payloads

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        if not self.payloads:
            raise StopAsyncIteration
        return Message("", self.payloads.pop(0))

    async def close(self) -> None:
        self.payloads.clear()


def following(index: PrefixIndex, telemetry: NullTelemetry, fetches: list[str]) -> IndexSync:
    """One that knows the source, and only notes that it would fetch a snapshot."""

    def spawn(work: Any, name: str) -> Any:
        work.close()
        fetches.append(name)

    bus: Any = None
    reader = IndexSync(bus, Subjects(), telemetry, index, spawn)
    reader.lease(WorkerLease(NAME, "decode", "w", "ready", 1, "0", 0), True)
    return reader


async def test_a_flood_of_events_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync, "SLICE_S", 0.0)
    index = begun()
    fetches: list[str] = []
    reader = following(index, NullTelemetry(), fetches)
    flood = Flood([encode(stored(number, PACKED[16 * number : 16 * number + 16])) for number in range(1, 51)])
    seen: list[int] = []

    async def watch() -> None:
        while flood.payloads:
            seen.append(len(index))
            await asyncio.sleep(0)

    await asyncio.gather(reader.follow(flood), watch())
    assert len(index) == 50
    assert len(set(seen)) > 40
    assert fetches == ["snapshot"]


async def test_events_without_sense_are_rejected_and_counted() -> None:
    """A million blocks at once, half a key, unknown parents (which say nothing here), a dead epoch, one from the future."""
    index, telemetry, fetches = begun(), NullTelemetry(), list[str]()
    reader = following(index, telemetry, fetches)
    orphan = KvEventBatch(NAME, "worker", "", 1, 1, [BlocksStored("device", b"?" * 16, PACKED[:16])])
    huge = KvEventBatch(NAME, "worker", "", 1, 1, [BlocksStored("device", b"", bytes(16) * 25_000)] * 40)
    torn, dead, future = stored(1, bytes(15)), stored(2, epoch=0), stored(7, epoch=9)
    await reader.follow(Flood([encode(batch) for batch in (huge, torn, orphan, dead, future)]))
    assert telemetry.total("router_rejected_events") == 3
    assert (len(index), index.state_of(NAME), fetches) == (1, "DEGRADED", ["snapshot"])
