from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.base import Bus, Message
from shared.errors import NoResponders
from shared.messages.subjects import Subjects


async def test_a_message_reaches_every_subscriber_and_one_of_a_queue_group(bus: Bus, subjects: Subjects) -> None:
    everyone = await bus.subscribe(subjects.cancel())
    first = await bus.subscribe(subjects.cancel(), queue="g")
    second = await bus.subscribe(subjects.cancel(), queue="g")
    await bus.publish(subjects.cancel(), b"x")
    assert (await anext(aiter(everyone))).payload == b"x"
    taken = await asyncio.wait([asyncio.ensure_future(anext(aiter(each))) for each in (first, second)], return_when=asyncio.FIRST_COMPLETED)
    assert len(taken[0]) == 1
    for task in taken[1]:
        task.cancel()


async def test_request_and_reply(bus: Bus, subjects: Subjects) -> None:
    async def double(message: Message) -> bytes:
        return message.payload * 2

    await bus.serve(subjects.session("ab", "wanted"), double)
    assert (await bus.request(subjects.session("ab", "wanted"), b"ab", timeout_s=5)).payload == b"abab"


async def test_nobody_listens(bus: Bus, subjects: Subjects) -> None:
    with pytest.raises(NoResponders):
        await bus.request(subjects.session("ab", "wanted"), b"", timeout_s=5)


async def test_work_queue(bus: Bus, subjects: Subjects) -> None:
    assert await bus.enqueue(subjects.decode("ab"), b"1", msg_id="a:0")
    assert not await bus.enqueue(subjects.decode("ab"), b"1", msg_id="a:0")
    consumer = await bus.consume(subjects.stream("decode"), subjects.durable("decode", "ab"), subjects.decode("ab"), window=4)
    delivery = await consumer.next()
    assert delivery.message.payload == b"1"
    assert delivery.num_delivered == 1
    await delivery.ack()
    await consumer.close(delete=True)


async def test_bucket(make_bus: Callable[[], Awaitable[Bus]], subjects: Subjects) -> None:
    bucket = await (await make_bus()).bucket(subjects.bucket("config"))
    other = await (await make_bus()).bucket(subjects.bucket("config"))
    revision = await bucket.create("a.b", b"1")
    entry = await other.get("a.b")
    assert entry and entry.value == b"1" and entry.revision == revision
    await other.update("a.b", b"2", revision)
    assert [(each.key, each.value) for each in await bucket.entries()] == [("a.b", b"2")]
