"""What NATS, the network and nats-py can do to a bus, against a real nats-server."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import uvloop

from shared.bus import bucket as bucket_module
from shared.bus import nats_bus, pull, streams
from shared.bus.base import Bus, Message
from shared.bus.nats import Connection
from shared.bus.nats_bus import NatsBus
from shared.bus.streams import provision
from shared.errors import BusClosed, BusError, BusTimeout, LinkDown
from shared.messages.subjects import Subjects
from tests.support.nats import NatsServer, connect_to
from tests.support.proxy import Proxy
from tests.support.waiting import until

WORKER = "0123abcd"
SUBJECTS = Subjects("ss")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No fault may show as a traceback in the log."""
    caplog.set_level(logging.INFO)
    yield
    tracebacks = [record for record in caplog.records if record.exc_info and record.name not in ALLOWED_TRACEBACKS]
    assert not tracebacks


ALLOWED_TRACEBACKS = {"shared.bus.wire", "shared.bus.dead_letters"}
"""Callbacks of a test that raise on purpose."""


@pytest.fixture
async def proxy(own_nats_server: NatsServer) -> AsyncIterator[Proxy]:
    async with Proxy(own_nats_server.port) as proxy:
        yield proxy


@pytest.fixture
async def bus(proxy: Proxy) -> AsyncIterator[NatsBus]:
    """Through the proxy."""
    bus = await connect_to(proxy.url)
    await provision(bus, SUBJECTS)
    yield bus
    await bus.close()


@pytest.fixture
async def other(own_nats_server: NatsServer) -> AsyncIterator[NatsBus]:
    """Not through the proxy."""
    bus = await connect_to(own_nats_server.url)
    yield bus
    await bus.close()


@pytest.fixture
def quick_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, rule in list(streams._DURABLES.items()):
        monkeypatch.setitem(streams._DURABLES, kind, replace(rule, ack_wait_s=0.1))


async def echo(message: Message) -> bytes:
    return message.payload


async def works(bus: Bus) -> None:
    """Requests, queues and buckets do, possibly after a while."""
    while True:
        with suppress(BusTimeout):
            consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", "ff"), SUBJECTS.decode("ff"), window=2)
            await bus.enqueue(SUBJECTS.decode("ff"), b"x", msg_id=random.randbytes(8).hex())
            await (await consumer.next()).ack()
            await consumer.close(delete=True)
            bucket = await bus.bucket(SUBJECTS.bucket("config"))
            assert await bucket.put("works", b"") > 0
            return


# -- the link goes and comes ------------------------------------------------------------------------------------------
FAULTS: dict[str, Callable[[NatsServer, Proxy], None]] = {
    "server killed": lambda server, proxy: server.restart(),
    "server ended in order": lambda server, proxy: (server.terminate(), server.start())[0],
    "server killed and wiped": lambda server, proxy: server.restart(wipe=True),
    "connection reset": lambda server, proxy: proxy.reset(),
    "garbage from the server": lambda server, proxy: proxy.inject(b"MSG what is this\r\n\x00\xff\r\n" * 50),
    "stale connection": lambda server, proxy: proxy.inject(b"-ERR 'Stale Connection'\r\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_everything_goes_on_after(fault: str, bus: NatsBus, own_nats_server: NatsServer, proxy: Proxy) -> None:
    reconnects: list[int] = []
    bus.on_reconnect(lambda: reconnects.append(1))
    heard = await bus.subscribe(SUBJECTS.cancel())
    await bus.serve(SUBJECTS.session("ab", "wanted"), echo)
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=4)
    waiting = asyncio.ensure_future(consumer.next())
    bucket = await bus.bucket(SUBJECTS.bucket("workers"))
    watch = bucket.watch()
    watching = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)

    FAULTS[fault](own_nats_server, proxy)
    await until(lambda: bus.counts["reconnect"] == 1 and bus.is_connected)

    assert reconnects == [1]
    assert (await bus.request(SUBJECTS.session("ab", "wanted"), b"x", timeout_s=5)).payload == b"x"
    await bus.publish(SUBJECTS.cancel(), b"after")
    assert (await anext(aiter(heard))).payload == b"after"
    assert await bus.enqueue(SUBJECTS.decode(WORKER), b"job", msg_id="a:0")
    assert (await waiting).message.payload == b"job"
    await bucket.put("decode.ab", b"lease")
    assert (await watching).key == "decode.ab"
    assert [entry.key for entry in await bucket.entries()] == ["decode.ab"]
    await watch.aclose()  # type: ignore[attr-defined]
    await works(bus)


async def test_many_resets(bus: NatsBus, proxy: Proxy) -> None:
    for number in range(5):
        proxy.reset()
        await until(lambda number=number: bus.counts["reconnect"] > number and bus.is_connected)  # type: ignore[misc]
    await works(bus)
    assert bus.counts["disconnect"] == 5


async def test_a_watch_repeats_every_key_after_a_reconnect(bus: NatsBus, other: NatsBus, proxy: Proxy) -> None:
    bucket = await bus.bucket(SUBJECTS.bucket("config"))
    await bucket.put("a", b"1")
    watch = bucket.watch()
    assert (await anext(watch)).value == b"1"
    proxy.black_hole()
    await until(lambda: not bus.is_connected)
    await (await other.bucket(SUBJECTS.bucket("config"))).put("b", b"2")
    proxy.mend()
    entries = [await anext(watch), await anext(watch)]
    assert {(entry.key, entry.value) for entry in entries} == {("a", b"1"), ("b", b"2")}
    assert bus.counts["watch_restarted"] == 1
    await watch.aclose()  # type: ignore[attr-defined]


async def test_a_black_hole_is_noticed_and_stops_the_clock(bus: NatsBus, proxy: Proxy) -> None:
    loop = asyncio.get_running_loop()
    before_s, wall_s = bus.clock.now(), loop.time()
    proxy.black_hole()
    await until(lambda: not bus.is_connected)
    assert bus.counts["deaf"] == 1
    while loop.time() < wall_s + 4:
        await asyncio.sleep(0.05)
    assert bus.clock.now() - before_s < 2.5  # nobody's lease of 3 s has run out
    proxy.mend()
    await until(lambda: bus.is_connected)
    await works(bus)


async def test_a_stopped_server_is_noticed(bus: NatsBus, own_nats_server: NatsServer) -> None:
    own_nats_server.stop()
    await until(lambda: not bus.is_connected)
    own_nats_server.cont()
    await until(lambda: bus.is_connected)
    await works(bus)


async def test_a_slow_network_is_no_fault(bus: NatsBus, proxy: Proxy) -> None:
    proxy.latency_s = 0.1
    await works(bus)
    assert bus.counts["disconnect"] == bus.counts["deaf"] == 0


async def test_an_answer_that_comes_after_the_watchdog_gave_up(bus: NatsBus, proxy: Proxy) -> None:
    """nats-py's read loop would die of a PONG for a ping that was cancelled."""
    proxy.black_hole()
    await until(lambda: not bus.is_connected)
    proxy.mend()
    await until(lambda: bus.is_connected)
    await works(bus)


async def test_callbacks_that_raise_stop_nobody(bus: NatsBus, proxy: Proxy) -> None:
    def fail() -> None:
        raise RuntimeError("on purpose")

    calls: list[int] = []
    bus.on_reconnect(fail)
    bus.on_reconnect(lambda: calls.append(1))
    proxy.reset()
    await until(lambda: calls)
    assert bus.counts["callback_failed"] == 1
    await works(bus)


# -- nothing late, nothing twice --------------------------------------------------------------------------------------
async def test_what_is_published_while_disconnected_is_never_sent(
    bus: NatsBus, other: NatsBus, own_nats_server: NatsServer, proxy: Proxy
) -> None:
    heard = await other.subscribe(SUBJECTS.cancel())
    proxy.black_hole()
    for _ in range(100):
        await bus.publish(SUBJECTS.cancel(), b"into the black hole" * 1000)
    await until(lambda: not bus.is_connected)
    for _ in range(100):
        await bus.publish(SUBJECTS.cancel(), b"while disconnected")
    assert bus.counts["publish_dropped"] >= 100
    await until(proxy.is_given_up)  # nats-py says that it is not connected before it closes the connection
    proxy.mend()
    await until(lambda: bus.is_connected)
    await bus.publish(SUBJECTS.cancel(), b"now")
    assert (await anext(aiter(heard))).payload == b"now"


async def test_what_is_published_on_a_link_that_has_just_broken_is_dropped(bus: NatsBus) -> None:
    connection = bus._wire
    assert isinstance(connection, Connection)
    connection._client._transport.close()
    await bus.publish(SUBJECTS.cancel(), b"nats-py does not know yet")
    await until(lambda: bus.counts["publish_dropped"] == 1 and bus.is_connected)
    await works(bus)


async def test_a_server_that_does_not_read_costs_bounded_memory(bus: NatsBus, proxy: Proxy) -> None:
    proxy.black_hole()
    payload = b"x" * 500_000
    while bus.is_connected:
        await bus.publish(SUBJECTS.cancel(), payload)
        await asyncio.sleep(0)
    assert bus.counts["publish_dropped"] > 0
    proxy.mend()
    await until(lambda: bus.is_connected)
    await works(bus)


async def test_requests_under_way_fail_when_the_link_goes(bus: NatsBus, proxy: Proxy) -> None:
    await bus.subscribe(SUBJECTS.session("ab", "wanted"))
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    asking = asyncio.ensure_future(bus.request(SUBJECTS.session("ab", "wanted"), b"", timeout_s=50))
    await asyncio.sleep(0.05)
    proxy.reset()
    with pytest.raises(LinkDown):
        await asking
    assert loop.time() - begun_s < 25


async def test_a_request_waits_for_the_link(bus: NatsBus, own_nats_server: NatsServer) -> None:
    await bus.serve(SUBJECTS.session("ab", "wanted"), echo)
    own_nats_server.kill()
    await until(lambda: not bus.is_connected)
    asking = asyncio.ensure_future(bus.request(SUBJECTS.session("ab", "wanted"), b"x", timeout_s=20))
    with pytest.raises(LinkDown):
        await bus.request(SUBJECTS.session("ab", "wanted"), b"x", timeout_s=0.05)
    own_nats_server.start()
    assert (await asking).payload == b"x"


async def test_a_message_is_stored_once_across_a_restart(bus: NatsBus, own_nats_server: NatsServer) -> None:
    storing = [asyncio.ensure_future(bus.enqueue(SUBJECTS.usage_event("ab"), b"%d" % n, msg_id=f"u:{n}")) for n in range(200)]
    await asyncio.sleep(0.01)
    own_nats_server.terminate()  # a kill may cost what the server acked a moment ago
    own_nats_server.start()
    await asyncio.gather(*storing)
    for number in range(200):
        assert not await bus.enqueue(SUBJECTS.usage_event("ab"), b"%d" % number, msg_id=f"u:{number}")
    assert await bus.jetstream.num_messages(SUBJECTS.stream("usage")) == 200


async def test_an_ack_while_disconnected_raises_nothing(bus: NatsBus, proxy: Proxy, quick_acks: None) -> None:
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=1)
    await bus.enqueue(SUBJECTS.decode(WORKER), b"job", msg_id="a:0")
    delivery = await consumer.next()
    proxy.black_hole()
    await until(lambda: not bus.is_connected)
    await delivery.in_progress()
    await delivery.ack()
    proxy.mend()
    again = await consumer.next()
    assert again.num_delivered >= 2
    await again.ack()


async def test_a_store_that_stays_away_is_said_so(bus: NatsBus, own_nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nats_bus, "ENQUEUE_S", 0.5)
    monkeypatch.setattr(bucket_module, "PUT_TIMEOUT_S", 0.5)
    bucket = await bus.bucket(SUBJECTS.bucket("config"))
    own_nats_server.kill()
    await until(lambda: not bus.is_connected)
    with pytest.raises(BusTimeout):
        await bus.enqueue(SUBJECTS.decode(WORKER), b"job", msg_id="a:0")
    with pytest.raises(BusTimeout):
        await bucket.put("a", b"")


# -- the pull loop ----------------------------------------------------------------------------------------------------
async def test_pull_requests_that_expire_are_asked_again(bus: NatsBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "EXPIRES_S", 0.1)
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=3)
    for number in range(5):
        await asyncio.sleep(0.25)
        await bus.enqueue(SUBJECTS.decode(WORKER), b"%d" % number, msg_id=f"a:{number}")
        delivery = await consumer.next()
        assert delivery.message.payload == b"%d" % number
        await delivery.ack()
    assert bus.counts["pull_lost"] == 0


async def test_a_durable_that_expired_is_made_again(bus: NatsBus, other: NatsBus) -> None:
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=3)
    await other.jetstream.delete_consumer(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER))
    await bus.enqueue(SUBJECTS.decode(WORKER), b"1", msg_id="a:0")
    assert (await consumer.next()).message.payload == b"1"


async def test_a_deleted_stream_is_made_again_under_load(bus: NatsBus, other: NatsBus) -> None:
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=3)
    taken: set[bytes] = set()

    async def take() -> None:
        while True:
            delivery = await consumer.next()
            taken.add(delivery.message.payload)
            await delivery.ack()

    taking = asyncio.create_task(take())
    for number in range(60):
        if number % 20 == 10:
            await other.jetstream.delete_stream(SUBJECTS.stream("decode"))
        await bus.enqueue(SUBJECTS.decode(WORKER), b"%d" % number, msg_id=f"a:{number}")
    await until(lambda: b"59" in taken)
    taking.cancel()
    assert bus.counts["stream_restored"] >= 1


async def test_a_stream_on_disk_is_not_made_again_into_the_folder_that_is_being_removed(
    bus: NatsBus, other: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_bus, "FOLDER_GONE_S", 3600.0)
    records, leases = (streams.BUCKET_PREFIX + SUBJECTS.bucket(name) for name in ("config", "workers"))
    for name in (records, leases):
        await other.jetstream.delete_stream(name)
    resting = asyncio.create_task(bus.restore(records))
    await bus.restore(leases)
    names = await other.jetstream.stream_names()
    assert leases in names and records not in names
    resting.cancel()
    with suppress(asyncio.CancelledError):
        await resting


async def test_looking_does_not_leak(bus: NatsBus) -> None:
    bucket = await bus.bucket(SUBJECTS.bucket("workers"))
    await bucket.entries()
    before = _resources(bus)
    for _ in range(20):
        await bucket.entries()
        await (await bus.subscribe(SUBJECTS.cancel())).close()
        watch = bucket.watch()
        watching = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await watch.aclose()  # type: ignore[attr-defined]
    assert _resources(bus) == before


def _resources(bus: NatsBus) -> tuple[int, ...]:
    wire = bus._wire
    return (len(wire._client._subs), len(wire._up), len(wire._down), len(asyncio.all_tasks()), len(bus._inbound), len(bus.requests._calls))  # type: ignore[attr-defined]


# -- closed for good --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", ["Maximum Subscriptions Exceeded", "Authorization Violation", "Maximum Payload Violation"])
async def test_a_connection_closed_for_good_is_fatal(error: str, bus: NatsBus, proxy: Proxy) -> None:
    closed: list[int] = []
    bus.on_closed(lambda: closed.append(1))
    heard = await bus.subscribe(SUBJECTS.cancel())
    await bus.subscribe(SUBJECTS.session("ab", "wanted"))
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=3)
    waiting = [
        asyncio.ensure_future(anext(aiter(heard))),
        asyncio.ensure_future(consumer.next()),
        asyncio.ensure_future(bus.request(SUBJECTS.session("ab", "wanted"), b"", timeout_s=30)),
    ]
    await asyncio.sleep(0.05)
    proxy.inject(f"-ERR '{error}'\r\n".encode())
    await until(lambda: closed)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, BusClosed)
        assert outcome.exit_code == 70
    with pytest.raises(BusClosed):
        await bus.publish(SUBJECTS.cancel(), b"")
    assert not bus.is_connected
    assert closed == [1]


async def test_a_message_above_the_limit_does_not_cost_the_connection(bus: NatsBus) -> None:
    """N1: headers and payload together above max_payload would close it for ever."""
    with suppress(BusError):
        await bus.publish(SUBJECTS.cancel(), b"x" * (2**20 - 100), headers={"A": "b" * 200})
    await works(bus)
    assert bus.counts["disconnect"] == 0


@pytest.mark.parametrize("state", ["up", "killed", "stopped"])
async def test_close_is_bounded(state: str, own_nats_server: NatsServer) -> None:
    bus = await connect_to(own_nats_server.url)
    await bus.subscribe(SUBJECTS.cancel())
    await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=3)
    if state == "killed":
        own_nats_server.kill()
        await until(lambda: not bus.is_connected)
    elif state == "stopped":
        own_nats_server.stop()
    async with asyncio.timeout(10):
        await bus.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if "nats" in task.get_name() or "pull" in task.get_name()]


async def test_what_was_published_before_close_arrives(other: NatsBus, own_nats_server: NatsServer) -> None:
    heard = await other.subscribe(SUBJECTS.cancel())
    bus = await connect_to(own_nats_server.url)
    for number in range(1000):
        await bus.publish(SUBJECTS.cancel(), b"%d" % number)
    await bus.close()
    for number in range(1000):
        assert (await anext(aiter(heard))).payload == b"%d" % number


# -- the other loop ---------------------------------------------------------------------------------------------------
def test_under_uvloop(own_nats_server: NatsServer) -> None:
    async def scenario() -> None:
        async with Proxy(own_nats_server.port) as proxy:
            bus = await connect_to(proxy.url)
            await provision(bus, SUBJECTS)
            await works(bus)
            proxy.reset()
            await until(lambda: bus.counts["reconnect"] == 1 and bus.is_connected)
            await works(bus)
            proxy.black_hole()
            for _ in range(20):
                await bus.publish(SUBJECTS.cancel(), b"x" * 500_000)
            await until(lambda: not bus.is_connected)
            proxy.mend()
            await until(lambda: bus.is_connected)
            await works(bus)
            await bus.close()

    uvloop.run(scenario())


# -- dead letters -----------------------------------------------------------------------------------------------------
async def test_a_dead_letter_leaves_nothing_behind(bus: NatsBus, other: NatsBus, quick_acks: None) -> None:
    buried: list[tuple[bytes, str]] = []

    async def bury(payload: bytes, subject: str) -> None:
        buried.append((payload, subject))

    for router in (bus, other):
        await router.on_dead_letter(SUBJECTS.stream("decode"), bury)
    await bus.enqueue(SUBJECTS.decode(WORKER), b"poison", msg_id="a:0")
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=1)
    for _ in range(3):
        await consumer.next()
    await until(lambda: buried)
    assert buried == [(b"poison", SUBJECTS.decode(WORKER))]
    assert await bus.jetstream.num_messages(SUBJECTS.stream("decode")) == 0
    assert await bus.jetstream.num_messages(SUBJECTS.stream("dead")) == 1
    found = await bus.jetstream.message_at(SUBJECTS.stream("dead"), 1)
    assert found == (SUBJECTS.dead("decode"), b"poison")
    assert bus.counts["dead_letter"] + other.counts["dead_letter"] == 1


async def test_work_that_was_done_after_all_is_no_dead_letter(bus: NatsBus, other: NatsBus, quick_acks: None) -> None:
    advisories = await bus.subscribe(f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{SUBJECTS.stream('decode')}.*")
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=1)
    await bus.enqueue(SUBJECTS.decode(WORKER), b"slow", msg_id="a:0")
    deliveries = [await consumer.next() for _ in range(3)]
    advisory = await anext(aiter(advisories))
    await deliveries[-1].ack()  # late, and accepted
    while await bus.jetstream.num_messages(SUBJECTS.stream("decode")):
        await asyncio.sleep(0.01)
    buried: list[bytes] = []

    async def bury(payload: bytes, subject: str) -> None:
        buried.append(payload)

    await bus.on_dead_letter(SUBJECTS.stream("decode"), bury)
    await other.publish(advisory.subject, advisory.payload)
    await bus.publish(advisory.subject, b"not an advisory")
    await bus.request(f"$JS.API.STREAM.INFO.{SUBJECTS.stream('decode')}", b"", timeout_s=5)
    assert buried == []
    assert await bus.jetstream.num_messages(SUBJECTS.stream("dead")) == 0


async def test_an_owner_of_dead_letters_that_fails(bus: NatsBus, quick_acks: None) -> None:
    async def fail(payload: bytes, subject: str) -> None:
        raise RuntimeError("on purpose")

    await bus.on_dead_letter(SUBJECTS.stream("decode"), fail)
    await bus.enqueue(SUBJECTS.decode(WORKER), b"poison", msg_id="a:0")
    consumer = await bus.consume(SUBJECTS.stream("decode"), SUBJECTS.durable("decode", WORKER), SUBJECTS.decode(WORKER), window=1)
    for _ in range(3):
        await consumer.next()
    await until(lambda: bus.counts["callback_failed"] == 1)
    assert await bus.jetstream.num_messages(SUBJECTS.stream("dead")) == 1
    await works(bus)
