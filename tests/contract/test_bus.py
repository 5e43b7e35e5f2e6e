"""What `Bus` promises, over memory and over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace

import pytest

from shared.bus import streams, work_queue
from shared.bus.base import Bucket, Bus, Consumer, Message
from shared.bus.streams import spec_of_bucket, spec_of_stream
from shared.errors import (
    BadRequest,
    BusClosed,
    BusTimeout,
    NoResponders,
    PayloadTooLarge,
    QueueFull,
    RevisionConflict,
    StreamMissing,
)
from shared.messages.subjects import Subjects
from tests.conftest import Buses
from tests.support.waiting import until

WORKER = "0123abcd"


async def consume(bus: Bus, subjects: Subjects, *, window: int = 4, worker: str = WORKER) -> Consumer:
    return await bus.consume(subjects.stream("decode"), subjects.durable("decode", worker), subjects.decode(worker), window=window)


@pytest.fixture
def quick_acks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ack_wait 0.3 s, so that a redelivery is not waited for long."""
    monkeypatch.setattr(work_queue, "IN_PROGRESS_S", 0.1)
    for kind, rule in list(streams._DURABLES.items()):
        monkeypatch.setitem(streams._DURABLES, kind, replace(rule, ack_wait_s=0.3))
    yield


# -- core messages ----------------------------------------------------------------------------------------------------
async def test_a_message_reaches_every_subscriber(bus: Bus, make_bus: Buses, subjects: Subjects) -> None:
    here, there = await bus.subscribe(subjects.cancel()), await (await make_bus()).subscribe(subjects.cancel())
    await bus.publish(subjects.cancel(), b"x", headers={"Traceparent": "00-aa"})
    message = await anext(aiter(here))
    assert (message.subject, message.payload, message.reply) == (subjects.cancel(), b"x", "")
    assert message.headers["traceparent"] == "00-aa"
    assert (await anext(aiter(there))).payload == b"x"


async def test_one_of_a_queue_group_gets_each_message(bus: Bus, subjects: Subjects) -> None:
    members = [await bus.subscribe(subjects.cancel(), queue="g") for _ in range(3)]
    for number in range(30):
        await bus.publish(subjects.cancel(), b"%d" % number)
    taken: list[bytes] = []

    async def take(member: object) -> None:
        async for message in member:  # type: ignore[attr-defined]
            taken.append(message.payload)

    tasks = [asyncio.create_task(take(member)) for member in members]
    await until(lambda: len(taken) >= 30)
    for member in members:
        await member.close()
    await asyncio.gather(*tasks)
    assert sorted(taken, key=int) == [b"%d" % number for number in range(30)]


async def test_wildcards(bus: Bus, subjects: Subjects) -> None:
    subscription = await bus.subscribe(subjects.load_event("*"))
    await bus.publish(subjects.kv_event("aa"), b"other")
    await bus.publish(subjects.load_event("aa"), b"mine")
    assert (await anext(aiter(subscription))).payload == b"mine"


async def test_a_closed_subscription_still_gives_what_is_here(bus: Bus, subjects: Subjects) -> None:
    subscription = await bus.subscribe(subjects.cancel())
    sentinel = await bus.subscribe(subjects.cancel())
    await bus.publish(subjects.cancel(), b"1")
    await anext(aiter(sentinel))
    await subscription.close()
    await subscription.close()
    assert [message.payload async for message in subscription] == [b"1"]


async def test_a_slow_subscriber_loses_messages_and_counts_them(bus: Bus, subjects: Subjects) -> None:
    few = await bus.subscribe(subjects.cancel(), max_messages=2)
    small = await bus.subscribe(subjects.cancel(), max_bytes=5)
    all_of_them = await bus.subscribe(subjects.cancel())
    for _ in range(4):
        await bus.publish(subjects.cancel(), b"abc")
    for _ in range(4):
        await anext(aiter(all_of_them))
    assert (few.num_dropped, small.num_dropped, all_of_them.num_dropped) == (2, 3, 0)
    assert bus.counts["message_dropped"] == 5


# -- requests ---------------------------------------------------------------------------------------------------------
async def test_request_and_reply(bus: Bus, make_bus: Buses, subjects: Subjects) -> None:
    async def double(message: Message) -> bytes:
        return message.payload * 2

    served = await (await make_bus()).serve(subjects.session("ab", "wanted"), double)
    replies = await asyncio.gather(*(bus.request(subjects.session("ab", "wanted"), b"%d" % n, timeout_s=5) for n in range(50)))
    assert [reply.payload for reply in replies] == [b"%d" % n * 2 for n in range(50)]
    await served.close()
    with pytest.raises(NoResponders):
        await bus.request(subjects.session("ab", "wanted"), b"", timeout_s=5)


async def test_nobody_answers(bus: Bus, subjects: Subjects) -> None:
    await bus.subscribe(subjects.session("ab", "wanted"))
    with pytest.raises(BusTimeout) as caught:
        await bus.request(subjects.session("ab", "wanted"), b"", timeout_s=0.05)
    assert caught.value.subject == subjects.session("ab", "wanted")
    assert caught.value.timeout_s == 0.05


async def test_errors_of_a_handler_travel_as_headers(bus: Bus, subjects: Subjects, caplog: pytest.LogCaptureFixture) -> None:
    async def fail(message: Message) -> bytes:
        if message.payload == b"bad":
            raise BadRequest("not so")
        raise RuntimeError("bug")

    await bus.serve(subjects.session("ab", "wanted"), fail)
    refused = await bus.request(subjects.session("ab", "wanted"), b"bad", timeout_s=5)
    assert refused.payload == b""
    assert refused.headers["nats-service-error"] == "not so"
    assert refused.headers["nats-service-error-code"] == "400"
    assert refused.headers["slipstream-error"] == BadRequest.code
    broken = await bus.request(subjects.session("ab", "wanted"), b"", timeout_s=5)
    assert broken.headers["slipstream-error"] == "internal_error"
    assert "bug" not in broken.headers["nats-service-error"]
    assert bus.counts["handler_failed"] == 1
    caplog.clear()


async def test_at_most_so_many_handlers_at_once(bus: Bus, subjects: Subjects) -> None:
    running, most = 0, 0
    go = asyncio.Event()

    async def slow(message: Message) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return message.payload

    await bus.serve(subjects.session("ab", "wanted"), slow, concurrency=3)
    requests = [asyncio.create_task(bus.request(subjects.session("ab", "wanted"), b"%d" % n, timeout_s=5)) for n in range(10)]
    await until(lambda: running == 3)
    go.set()
    assert sorted(reply.payload for reply in await asyncio.gather(*requests)) == [b"%d" % n for n in range(10)]
    assert most == 3


async def test_a_handler_answers_inboxes_only(bus: Bus, subjects: Subjects) -> None:
    async def answer(message: Message) -> bytes:
        return b"answer"

    await bus.serve(subjects.session("ab", "wanted"), answer)
    trap = await bus.subscribe(subjects.cancel())
    await bus.publish(subjects.session("ab", "wanted"), b"", reply=subjects.cancel())
    await until(lambda: bus.counts["reply_refused"] == 1)
    await bus.publish(subjects.cancel(), b"end")
    assert (await anext(aiter(trap))).payload == b"end"


async def test_a_reply_that_is_too_large_is_an_error(bus: Bus, subjects: Subjects) -> None:
    async def answer(message: Message) -> bytes:
        return b"x" * (bus.max_message_bytes + 1)

    await bus.serve(subjects.session("ab", "wanted"), answer)
    reply = await bus.request(subjects.session("ab", "wanted"), b"", timeout_s=5)
    assert reply.headers["slipstream-error"] == PayloadTooLarge.code


async def test_many_replies(bus: Bus, make_bus: Buses, subjects: Subjects) -> None:
    door = await make_bus()
    requests = await door.subscribe(subjects.front_door("generate"), queue="gateways")

    async def stream() -> None:
        async for message in requests:
            for number in range(int(message.payload)):
                await door.publish(message.reply, b"%d" % number)
            await door.publish(message.reply, b"", headers={"Ss-Final": "1"})

    streaming = asyncio.create_task(stream())
    replies = [message async for message in bus.request_many(subjects.front_door("generate"), b"5", stall_s=5)]
    assert [message.payload for message in replies] == [b"0", b"1", b"2", b"3", b"4", b""]
    assert replies[-1].headers["ss-final"] == "1"
    await requests.close()
    await streaming
    with pytest.raises(NoResponders):
        async for _ in bus.request_many(subjects.front_door("generate"), b"5", stall_s=5):
            pass


async def test_many_replies_that_stall(bus: Bus, subjects: Subjects) -> None:
    requests = await bus.subscribe(subjects.front_door("generate"))
    replies = bus.request_many(subjects.front_door("generate"), b"", stall_s=0.1)
    first = asyncio.ensure_future(anext(replies))
    await bus.publish((await anext(aiter(requests))).reply, b"1")
    assert (await first).payload == b"1"
    with pytest.raises(BusTimeout):
        await anext(replies)


async def test_too_large_a_message_never_leaves(bus: Bus, subjects: Subjects) -> None:
    heard = await bus.subscribe(subjects.cancel())
    limit = bus.max_message_bytes
    assert limit == 2**20 * 9 // 10
    for headers, num_bytes in ((None, limit + 1), ({"A": "b" * 500}, limit - 100), ({"A": "é" * 100}, limit - 150)):
        payload = b"x" * num_bytes
        with pytest.raises(PayloadTooLarge):
            await bus.publish(subjects.cancel(), payload, headers=headers)
        with pytest.raises(PayloadTooLarge):
            await bus.request(subjects.cancel(), payload, headers=headers, timeout_s=5)
        with pytest.raises(PayloadTooLarge):
            await bus.enqueue(subjects.decode(WORKER), payload, headers=headers, msg_id="a")
    await bus.publish(subjects.cancel(), b"x" * limit)
    assert len((await anext(aiter(heard))).payload) == limit


# -- work queues ------------------------------------------------------------------------------------------------------
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


# -- buckets ----------------------------------------------------------------------------------------------------------
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


# -- the end ----------------------------------------------------------------------------------------------------------
async def test_a_closed_bus(bus: Bus, subjects: Subjects) -> None:
    subscription = await bus.subscribe(subjects.cancel())
    consumer = await consume(bus, subjects)
    bucket = await bus.bucket(subjects.bucket("config"))
    iterating = asyncio.ensure_future(anext(aiter(subscription), None))
    waiting = asyncio.ensure_future(consumer.next())
    await asyncio.sleep(0)
    closed: list[int] = []
    bus.on_closed(lambda: closed.append(1))
    await bus.close()
    await bus.close()
    assert await iterating is None
    assert not bus.is_connected
    assert not closed  # we closed it ourselves
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: waiting,
        lambda: bus.publish(subjects.cancel(), b""),
        lambda: bus.request(subjects.cancel(), b"", timeout_s=1),
        lambda: bus.enqueue(subjects.decode(WORKER), b"", msg_id="a"),
        lambda: bus.subscribe(subjects.cancel()),
        lambda: bucket.put("a", b""),
        lambda: bucket.get("a"),
    ]
    for call in calls:
        with pytest.raises(BusClosed):
            await call()


async def test_what_expects_no_answer_is_handled_too(bus: Bus, subjects: Subjects) -> None:
    handled: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message: Message) -> bytes:
        handled.put_nowait(message.payload)
        return b"nobody reads this"

    await bus.serve(subjects.kv("aaaaaaaa", "release"), take)
    await bus.publish(subjects.kv("aaaaaaaa", "release"), b"told")
    assert await handled.get() == b"told"
