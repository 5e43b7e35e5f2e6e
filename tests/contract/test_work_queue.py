"""What `Bus` promises of work queues, over memory and over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shared.bus import streams, work_queue
from shared.bus.base import Bus, Consumer
from shared.bus.streams import spec_of_stream
from shared.errors import (
    BusClosed,
    QueueFull,
    StreamMissing,
)
from shared.messages.subjects import Subjects
from tests.conftest import Buses
from tests.support.consuming import WORKER, consume
from tests.support.waiting import until


@pytest.fixture
def quick_acks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ack_wait 0.3 s, so that a redelivery is not waited for long."""
    monkeypatch.setattr(work_queue, "IN_PROGRESS_S", 0.1)
    for kind, rule in list(streams._DURABLES.items()):
        monkeypatch.setitem(streams._DURABLES, kind, replace(rule, ack_wait_s=0.3))
    yield


async def test_work_goes_to_one_consumer_once(bus: Bus, make_bus: Buses, subjects: Subjects) -> None:
    for number in range(20):
        assert await bus.enqueue(subjects.request("high", "ab"), b"%d" % number, msg_id=f"a:{number}")
    queue = (subjects.stream("requests"), subjects.durable("requests", "high"), subjects.request("high", "*"))
    consumers = [await (await make_bus()).consume(*queue, window=3) for _ in range(2)]
    taken: list[bytes] = []

    async def work(consumer: Consumer) -> None:
        while True:
            delivery = await consumer.next()
            assert delivery.num_delivered == 1
            assert 0 <= delivery.age_s < 30
            taken.append(delivery.message.payload)
            await delivery.ack()

    workers = [asyncio.create_task(work(consumer)) for consumer in consumers]
    await until(lambda: len(taken) >= 20)
    for consumer in consumers:
        await consumer.close()
    for result in await asyncio.gather(*workers, return_exceptions=True):
        assert isinstance(result, BusClosed)
    assert sorted(taken, key=int) == [b"%d" % number for number in range(20)]


async def test_the_same_id_is_stored_once(bus: Bus, subjects: Subjects) -> None:
    assert await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0", headers={"X-Y": "z"})
    assert not await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    assert await bus.enqueue(subjects.decode(WORKER), b"2", msg_id="a:1")
    consumer = await consume(bus, subjects)
    first, second = await consumer.next(), await consumer.next()
    assert (first.message.payload, second.message.payload) == (b"1", b"2")
    assert first.message.subject == subjects.decode(WORKER)
    assert first.message.headers["x-y"] == "z"
    assert first.stream_sequence < second.stream_sequence


async def test_work_that_is_not_acked_comes_back(bus: Bus, subjects: Subjects, quick_acks: None) -> None:
    consumer = await consume(bus, subjects)
    await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    assert (await consumer.next()).num_delivered == 1
    again = await consumer.next()
    assert (again.message.payload, again.num_delivered) == (b"1", 2)
    await again.ack()
    await again.ack()


async def test_work_in_progress_stays_away(bus: Bus, subjects: Subjects, quick_acks: None) -> None:
    consumer = await consume(bus, subjects)
    await bus.enqueue(subjects.decode(WORKER), b"slow", msg_id="a:0")
    delivery = await consumer.next()
    for _ in range(6):
        await asyncio.sleep(0.1)
        await delivery.in_progress()
    await delivery.ack()
    await bus.enqueue(subjects.decode(WORKER), b"next", msg_id="a:1")
    assert (await consumer.next()).message.payload == b"next"


async def test_work_that_waits_here_stays_in_progress(bus: Bus, subjects: Subjects, quick_acks: None) -> None:
    consumer = await consume(bus, subjects, window=2)
    await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    await asyncio.sleep(0.7)  # more than twice ack_wait; nobody calls `next`
    delivery = await consumer.next()
    assert delivery.num_delivered == 1
    await delivery.ack()


async def test_terminated_work_is_gone(bus: Bus, subjects: Subjects, quick_acks: None) -> None:
    consumer = await consume(bus, subjects)
    await bus.enqueue(subjects.decode(WORKER), b"bad", msg_id="a:0")
    await (await consumer.next()).term()
    await bus.enqueue(subjects.decode(WORKER), b"good", msg_id="a:1")
    assert (await consumer.next()).message.payload == b"good"


async def test_a_dead_letter(bus: Bus, make_bus: Buses, subjects: Subjects, quick_acks: None, caplog: pytest.LogCaptureFixture) -> None:
    buried: list[tuple[bytes, str]] = []

    async def bury(payload: bytes, subject: str) -> None:
        buried.append((payload, subject))

    for router in (bus, await make_bus()):  # two routers listen, one acts
        await router.on_dead_letter(subjects.stream("decode"), bury)
    consumer = await consume(bus, subjects)
    await bus.enqueue(subjects.decode(WORKER), b"poison", msg_id="a:0")
    assert [(await consumer.next()).num_delivered for _ in range(3)] == [1, 2, 3]
    taking = asyncio.create_task(consumer.next())
    await until(lambda: buried)
    assert buried == [(b"poison", subjects.decode(WORKER))]
    await bus.enqueue(subjects.decode(WORKER), b"next", msg_id="a:1")
    assert (await taking).message.payload == b"next"
    caplog.clear()


async def test_requests_are_delivered_for_ever(bus: Bus, subjects: Subjects, quick_acks: None) -> None:
    queue = (subjects.stream("requests"), subjects.durable("requests", "high"), subjects.request("high", "*"))
    consumer = await bus.consume(*queue, window=1)
    await bus.enqueue(subjects.request("high", "ab"), b"1", msg_id="a:0")
    assert [(await consumer.next()).num_delivered for _ in range(5)] == [1, 2, 3, 4, 5]


async def test_a_full_subject_refuses_and_others_do_not(bus: Bus, subjects: Subjects) -> None:
    await bus.add_stream(replace(spec_of_stream(subjects.stream("decode")), max_messages_per_subject=2))
    for number in range(2):
        await bus.enqueue(subjects.decode("aa"), b"1", msg_id=f"a:{number}")
    with pytest.raises(QueueFull) as caught:
        await bus.enqueue(subjects.decode("aa"), b"1", msg_id="a:2")
    assert caught.value.subject == subjects.decode("aa")
    assert await bus.enqueue(subjects.decode("bb"), b"1", msg_id="b:0")


async def test_a_full_stream_refuses(bus: Bus, subjects: Subjects) -> None:
    await bus.add_stream(replace(spec_of_stream(subjects.stream("requests")), max_messages=1))
    await bus.enqueue(subjects.request("high", "aa"), b"1", msg_id="a:0")
    with pytest.raises(QueueFull):
        await bus.enqueue(subjects.request("high", "bb"), b"1", msg_id="b:0")


async def test_a_subject_of_no_stream(bus: Bus, subjects: Subjects) -> None:
    with pytest.raises(StreamMissing):
        await bus.enqueue(subjects.cancel(), b"1", msg_id="a:0")
    with pytest.raises(StreamMissing):
        await bus.consume("NOBODYS", "d", "x", window=1)
    with pytest.raises(StreamMissing):
        await bus.bucket("nobodys")


async def test_a_paused_consumer_asks_for_no_more(bus: Bus, subjects: Subjects) -> None:
    consumer = await consume(bus, subjects, window=1)
    await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    await (await consumer.next()).ack()
    consumer.pause()
    for number in range(1, 6):
        await bus.enqueue(subjects.decode(WORKER), b"1", msg_id=f"a:{number}")
    taken: list[object] = []

    async def take() -> None:
        while True:
            delivery = await consumer.next()
            taken.append(delivery)
            await delivery.ack()

    taking = asyncio.create_task(take())
    await asyncio.sleep(0.2)
    assert len(taken) <= 1  # what was asked for already may still come
    consumer.resume()
    await until(lambda: len(taken) == 5)
    taking.cancel()


async def test_a_cancelled_next_loses_nothing(bus: Bus, subjects: Subjects) -> None:
    consumer = await consume(bus, subjects)
    for _ in range(5):
        waiting = asyncio.create_task(consumer.next())
        await asyncio.sleep(0)
        waiting.cancel()
    await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    assert (await consumer.next()).message.payload == b"1"


async def test_a_dead_workers_queue_is_purged(bus: Bus, subjects: Subjects) -> None:
    stream, durable = subjects.stream("decode"), subjects.durable("decode", WORKER)
    dead = await consume(bus, subjects, window=1)
    for number in range(3):
        await bus.enqueue(subjects.decode(WORKER), b"old", msg_id=f"a:{number}")
    await dead.next()
    await dead.close()
    await bus.delete_durable(stream, durable, subjects.decode(WORKER))
    await bus.delete_durable(stream, durable, subjects.decode(WORKER))
    await bus.enqueue(subjects.decode(WORKER), b"new", msg_id="b:0")
    assert (await (await consume(bus, subjects)).next()).message.payload == b"new"


async def test_a_deleted_durable_gives_back_what_it_held(bus: Bus, subjects: Subjects) -> None:
    consumer = await consume(bus, subjects)
    await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    await consumer.next()
    await consumer.close(delete=True)
    await consumer.close(delete=True)
    assert (await (await consume(bus, subjects)).next()).message.payload == b"1"


async def test_a_closed_consumer(bus: Bus, subjects: Subjects) -> None:
    consumer = await consume(bus, subjects)
    waiting = asyncio.create_task(consumer.next())
    await asyncio.sleep(0)
    await consumer.close()
    with pytest.raises(BusClosed):
        await waiting
    with pytest.raises(BusClosed):
        await consumer.next()


async def test_wiped_streams_are_made_again(bus: Bus, make_bus: Buses, subjects: Subjects) -> None:
    consumer = await consume(bus, subjects)
    waiting = asyncio.create_task(consumer.next())
    await make_bus.wipe()
    assert await bus.enqueue(subjects.decode(WORKER), b"1", msg_id="a:0")
    assert (await waiting).message.payload == b"1"
