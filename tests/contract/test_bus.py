"""What `Bus` promises of messages, requests and its end, over memory and over a real nats-server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.bus.base import Bus, Message
from shared.errors import (
    BadRequest,
    BusClosed,
    BusTimeout,
    NoResponders,
    PayloadTooLarge,
)
from shared.messages.subjects import Subjects
from tests.conftest import Buses
from tests.support.consuming import WORKER, consume
from tests.support.waiting import until


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


async def test_what_expects_no_answer_is_handled_too(bus: Bus, subjects: Subjects) -> None:
    handled: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message: Message) -> bytes:
        handled.put_nowait(message.payload)
        return b"nobody reads this"

    await bus.serve(subjects.kv("aaaaaaaa", "release"), take)
    await bus.publish(subjects.kv("aaaaaaaa", "release"), b"told")
    assert await handled.get() == b"told"


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
