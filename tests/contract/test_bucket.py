"""What `Bus` promises of buckets, over memory and over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from shared.bus.base import Bucket, Bus
from shared.bus.streams import spec_of_bucket
from shared.errors import (
    RevisionConflict,
)
from shared.messages.subjects import Subjects
from tests.conftest import Buses


@pytest.fixture
async def bucket(bus: Bus, subjects: Subjects) -> Bucket:
    return await bus.bucket(subjects.bucket("config"))


async def test_put_and_get(bucket: Bucket) -> None:
    assert await bucket.get("a.b") is None
    first = await bucket.put("a.b", b"1")
    second = await bucket.put("a.b", b"2")
    assert second > first
    entry = await bucket.get("a.b")
    assert entry and (entry.key, entry.value, entry.revision) == ("a.b", b"2", second)
    await bucket.put("a.c", b"")
    empty = await bucket.get("a.c")
    assert empty and empty.value == b""


async def test_compare_and_set(bucket: Bucket) -> None:
    first = await bucket.create("k", b"1")
    with pytest.raises(RevisionConflict) as caught:
        await bucket.create("k", b"2")
    assert caught.value.key == "k"
    second = await bucket.update("k", b"2", first)
    with pytest.raises(RevisionConflict):
        await bucket.update("k", b"3", first)
    await bucket.delete("k")
    assert await bucket.get("k") is None
    with pytest.raises(RevisionConflict):
        await bucket.update("k", b"3", second)
    await bucket.create("k", b"4")
    entry = await bucket.get("k")
    assert entry and entry.value == b"4"


async def test_entries_are_those_present(bucket: Bucket) -> None:
    assert await bucket.entries() == []
    for number in range(300):
        await bucket.put(f"k.{number}", b"%d" % number)
    await bucket.delete("k.7")
    await bucket.delete("absent")
    entries = {entry.key: entry.value for entry in await bucket.entries()}
    assert entries == {f"k.{number}": b"%d" % number for number in range(300) if number != 7}


async def test_a_watch_begins_with_what_is_there(bucket: Bucket, make_bus: Buses, subjects: Subjects) -> None:
    await bucket.put("a", b"1")
    watch = bucket.watch()
    first = await anext(watch)
    assert (first.key, first.value) == ("a", b"1")
    other = await (await make_bus()).bucket(subjects.bucket("config"))
    await other.put("b", b"2")
    await other.delete("a")
    assert [(entry.key, entry.value) for entry in [await anext(watch), await anext(watch)]] == [("b", b"2"), ("a", None)]
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_watch_survives_a_wipe(bucket: Bucket, make_bus: Buses) -> None:
    await bucket.put("a", b"1")
    watch = bucket.watch()
    await anext(watch)
    changed = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    await make_bus.wipe()
    while await bucket.get("a") is not None:  # a server may answer from a stream for a moment after it said that it was deleted
        await asyncio.sleep(0.01)
    assert await bucket.entries() == []
    await bucket.put("b", b"2")
    assert (await changed).key == "b"
    await watch.aclose()  # type: ignore[attr-defined]


async def test_leases_run_out(bus: Bus, subjects: Subjects) -> None:
    leases = await bus.bucket(subjects.bucket("workers"))
    spec = spec_of_bucket(subjects.bucket("workers"))
    assert spec.max_age_s == 3.0
    await bus.add_stream(replace(spec, max_age_s=0.3))
    await leases.create("decode.ab", b"1")
    while await leases.get("decode.ab") is not None:
        await asyncio.sleep(0.02)
    assert await leases.entries() == []
    await leases.create("decode.ab", b"2")


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a*", ">", "a\r\nb", "é"])
async def test_what_cannot_be_a_key(bucket: Bucket, key: str) -> None:
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: bucket.get(key),
        lambda: bucket.put(key, b""),
        lambda: bucket.create(key, b""),
        lambda: bucket.delete(key),
        lambda: bucket.update(key, b"", 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="key"):
            await call()
