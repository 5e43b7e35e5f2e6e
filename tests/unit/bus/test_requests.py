from __future__ import annotations

import asyncio

import pytest

from shared.bus.base import Message
from shared.bus.requests import Requests
from shared.errors import BusClosed, BusTimeout, LinkDown, NoResponders, PermissionDenied
from tests.support.fake_wire import FakeWire


@pytest.fixture
def wire() -> FakeWire:
    return FakeWire()


@pytest.fixture
async def requests(wire: FakeWire) -> Requests:
    requests = Requests(wire)
    await requests.open()
    return requests


def answer(wire: FakeWire, payload: bytes, **headers: str) -> None:
    """The last request is answered."""
    wire.arrive(wire.sent[-1].reply, Message(wire.sent[-1].reply, payload, "", headers))


async def test_replies_find_their_requests(wire: FakeWire, requests: Requests) -> None:
    asked = [asyncio.ensure_future(requests.one(f"s.{number}", b"", timeout_s=5)) for number in range(3)]
    await asyncio.sleep(0)
    for message in reversed(wire.sent):
        wire.arrive(message.reply, Message(message.reply, message.subject.encode()))
    assert [(await each).payload for each in asked] == [b"s.0", b"s.1", b"s.2"]


async def test_what_ends_a_request(wire: FakeWire, requests: Requests) -> None:
    async def fails(error: type[Exception], how: object, subject: str = "a.B") -> None:
        asking = asyncio.ensure_future(requests.one(subject, b"", timeout_s=30))
        await asyncio.sleep(0)
        how()  # type: ignore[operator]
        with pytest.raises(error):
            await asking
        assert not requests._calls

    await fails(NoResponders, lambda: answer(wire, b"", status="503"))
    await fails(PermissionDenied, lambda: wire.deny('nats: permissions violation for publish to "a.b"'))
    await fails(LinkDown, wire.go_down)
    with pytest.raises(LinkDown):
        await requests.one("a", b"", timeout_s=0)
    wire.come_up()
    await fails(BusClosed, requests.close)
    with pytest.raises(BusTimeout) as caught:
        await requests.one("a", b"", timeout_s=0.001)
    assert caught.value.timeout_s == 0.001


async def test_a_denial_concerns_its_own_subject_only(wire: FakeWire, requests: Requests) -> None:
    asking = asyncio.ensure_future(requests.one("a.b", b"", timeout_s=30))
    await asyncio.sleep(0)
    wire.deny('nats: permissions violation for publish to "a.c"')
    wire.deny('nats: permissions violation for subscription to "a.b"')
    answer(wire, b"x")
    assert (await asking).payload == b"x"
    assert wire.counts["permission_denied"] == 2
    assert wire.denied_subscriptions == {"a.b"}


async def test_a_payload_with_a_status_is_no_status(wire: FakeWire, requests: Requests) -> None:
    asking = asyncio.ensure_future(requests.one("a", b"", timeout_s=30))
    await asyncio.sleep(0)
    answer(wire, b"x", status="503")
    assert (await asking).payload == b"x"


async def test_late_and_foreign_replies_are_ignored(wire: FakeWire, requests: Requests) -> None:
    with pytest.raises(BusTimeout):
        await requests.one("a", b"", timeout_s=0.001)
    answer(wire, b"late")
    wire.arrive("_INBOX.test.r.zzz", Message("_INBOX.test.r.zzz", b"foreign"))
    assert not requests._calls


async def test_a_cancelled_request_is_forgotten(wire: FakeWire, requests: Requests) -> None:
    asking = asyncio.ensure_future(requests.one("a", b"", timeout_s=30))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not requests._calls


async def test_many_replies_that_came_before_they_were_taken(wire: FakeWire, requests: Requests) -> None:
    replies = requests.many("a", b"", stall_s=5)
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    for payload in (b"1", b"2", b""):
        answer(wire, payload)
    assert (await first).payload == b"1"
    assert [reply.payload async for reply in replies] == [b"2", b""]
    assert not requests._calls


async def test_many_replies_and_the_link_goes(wire: FakeWire, requests: Requests) -> None:
    replies = requests.many("a", b"", stall_s=5)
    first = asyncio.ensure_future(anext(replies))
    await asyncio.sleep(0)
    answer(wire, b"1")
    wire.go_down()
    assert (await first).payload == b"1"  # what came is not lost
    with pytest.raises(LinkDown):
        await anext(replies)
