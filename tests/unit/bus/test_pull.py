from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.bus import pull
from shared.bus.base import Message
from shared.bus.pull import PullLoop
from shared.errors import BusClosed, BusTimeout
from tests.support.fake_wire import FakeWire
from tests.support.waiting import until

INBOX = "_INBOX.test.p0"


class Loop(PullLoop[bytes]):
    num_prepared = 0
    faults = 0

    async def prepare(self) -> str:
        if self.faults:
            self.faults -= 1
            raise BusTimeout("a", 1)
        self.num_prepared += 1
        return "d"

    def accept(self, message: Message) -> bytes | None:
        return message.payload or None


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> FakeWire:
    monkeypatch.setattr(pull, "TICK_S", 0.01)
    monkeypatch.setattr(pull, "RETRY_S", 0.01)
    return FakeWire()


@pytest.fixture
async def loop(wire: FakeWire) -> AsyncIterator[Loop]:
    loop = Loop(wire, "S", 4, INBOX)
    await loop.open()
    yield loop
    await loop.shut()


def asked(wire: FakeWire) -> list[int]:
    """The batch of each pull request."""
    assert all(message.subject == "$JS.API.CONSUMER.MSG.NEXT.S.d" for message in wire.sent)
    return [msgspec.json.decode(message.payload)["batch"] for message in wire.sent]


def deliver(wire: FakeWire, payload: bytes = b"x") -> None:
    wire.arrive(f"{INBOX}.0", Message("s.v1.work", payload, "$JS.ACK"))


def status(wire: FakeWire, request: int, code: str, description: str = "") -> None:
    reply = wire.sent[request].reply
    wire.arrive(reply, Message(reply, b"", "", {"status": code, "description": description}))


async def test_a_window_of_credits(wire: FakeWire, loop: Loop) -> None:
    await until(lambda: asked(wire) == [4])
    for _ in range(4):
        deliver(wire)
    await asyncio.sleep(0.05)
    assert asked(wire) == [4]  # four lie here, nobody took them
    for _ in range(2):
        assert await loop.take() == b"x"
    await until(lambda: asked(wire) == [4, 2])
    expires_ns = msgspec.json.decode(wire.sent[0].payload)["expires"]
    assert expires_ns == int(pull.EXPIRES_S * 1e9)


@pytest.mark.parametrize(
    ("code", "description"), [("404", "No Messages"), ("408", "Request Timeout"), ("409", "Leadership Change"), ("400", "odd")]
)
async def test_a_request_that_ends_is_asked_again(wire: FakeWire, loop: Loop, code: str, description: str) -> None:
    await until(lambda: asked(wire) == [4])
    deliver(wire)
    status(wire, 0, code, description)
    await until(lambda: asked(wire) == [4, 3])
    assert loop.num_prepared == 1


@pytest.mark.parametrize(("code", "description"), [("503", ""), ("409", "Consumer Deleted")])
async def test_a_consumer_that_is_gone_is_made_again(wire: FakeWire, loop: Loop, code: str, description: str) -> None:
    await until(lambda: asked(wire) == [4])
    status(wire, 0, code, description)
    await until(lambda: asked(wire) == [4, 4])
    assert loop.num_prepared == 2


async def test_a_request_without_a_word_is_asked_again(wire: FakeWire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull, "EXPIRES_S", 0.02)
    monkeypatch.setattr(pull, "OVERDUE_S", 0.0)
    loop = Loop(wire, "S", 4, INBOX)
    await loop.open()
    await until(lambda: len(asked(wire)) >= 3)
    assert wire.counts["pull_lost"] >= 2
    await loop.shut()


async def test_an_old_status_changes_nothing(wire: FakeWire, loop: Loop) -> None:
    await until(lambda: asked(wire) == [4])
    status(wire, 0, "408")
    await until(lambda: asked(wire) == [4, 4])
    status(wire, 0, "408")
    await asyncio.sleep(0.05)
    assert asked(wire) == [4, 4]


async def test_a_reconnect_asks_for_everything_anew(wire: FakeWire, loop: Loop) -> None:
    await until(lambda: asked(wire) == [4])
    deliver(wire)
    wire.go_down()
    await asyncio.sleep(0.03)
    assert asked(wire) == [4]
    wire.come_up()
    await until(lambda: asked(wire) == [4, 3])
    assert loop.num_prepared == 2
    assert await loop.take() == b"x"


async def test_pause_and_resume(wire: FakeWire, loop: Loop) -> None:
    await until(lambda: asked(wire) == [4])
    loop.pause()
    for _ in range(4):
        deliver(wire)
    for _ in range(4):
        await loop.take()
    await asyncio.sleep(0.05)
    assert asked(wire) == [4]
    loop.resume()
    await until(lambda: asked(wire) == [4, 4])


async def test_a_fault_in_prepare_is_tried_again(wire: FakeWire, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(wire, "S", 4, INBOX)
    loop.faults = 1
    with pytest.raises(BusTimeout):
        await loop.open()
    loop.faults = 2
    await loop.open(now=False)
    await until(lambda: asked(wire) == [4])
    assert loop.num_prepared == 1
    await loop.shut()
    caplog.clear()


async def test_takers_are_served_in_turn_and_none_is_forgotten(wire: FakeWire, loop: Loop) -> None:
    takers = [asyncio.create_task(loop.take()) for _ in range(3)]
    await asyncio.sleep(0)
    deliver(wire, b"1")
    takers[0].cancel()  # woken, and cancelled before it ran
    deliver(wire, b"2")
    with pytest.raises(asyncio.CancelledError):
        await takers[0]
    assert sorted([await takers[1], await takers[2]]) == [b"1", b"2"]


async def test_the_end(wire: FakeWire, loop: Loop) -> None:
    deliver(wire)
    takers = [asyncio.create_task(loop.take()) for _ in range(3)]
    await asyncio.sleep(0)
    wire.end()
    outcomes = await asyncio.gather(*takers, return_exceptions=True)
    assert outcomes[0] == b"x"
    assert [type(outcome) for outcome in outcomes[1:]] == [BusClosed, BusClosed]
    await loop.shut()
    assert not wire.listeners
    assert not wire._up and not wire._down and not wire._closed


async def test_unwanted_messages_are_dropped(wire: FakeWire, loop: Loop) -> None:
    deliver(wire, b"")
    deliver(wire, b"y")
    assert await loop.take() == b"y"
