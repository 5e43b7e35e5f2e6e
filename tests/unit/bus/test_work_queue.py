from __future__ import annotations

import time

import pytest

from shared.bus.base import Message
from shared.bus.work_queue import ACK, TERM, AckSubject, NatsDelivery, ServerClock, parse_ack_subject
from tests.support.fake_wire import FakeWire

TOLD = AckSubject(2, 17, 5, 1_700_000_000_000_000_000, 3)
FIELDS = "2.17.5.1700000000000000000.3"


@pytest.mark.parametrize("reply", [f"$JS.ACK.SS_DECODE.decode-ab.{FIELDS}", f"$JS.ACK.hub.acc.SS_DECODE.decode-ab.{FIELDS}.token"])
def test_what_the_reply_subject_tells(reply: str) -> None:
    assert parse_ack_subject(reply) == TOLD


@pytest.mark.parametrize("reply", ["", "_INBOX.x.y", "$JS.ACK", "$JS.ACK.s.c.1.2.3", "$JS.ACK.s.c.1.2.3.x.5", "$KV.ACK.s.c.1.2.3.4.5"])
def test_not_a_message_of_a_stream(reply: str) -> None:
    assert parse_ack_subject(reply) is None


@pytest.mark.parametrize(
    "text", ["2033-05-18T03:33:20.123456789Z", "2033-05-18T03:33:20.123456Z", "2033-05-18T03:33:20Z", "2033-05-18T05:33:20+02:00"]
)
def test_the_servers_clock(text: str) -> None:
    clock = ServerClock()
    clock.set(text)
    assert 0 <= clock.now_ns() - 2_000_000_000 * 10**9 < 60 * 10**9


def test_without_the_servers_clock_our_own_serves() -> None:
    clock = ServerClock()
    clock.set("yesterday")
    assert abs(clock.now_ns() - time.time_ns()) < 60 * 10**9


async def test_a_message_is_settled_once() -> None:
    wire = FakeWire()
    delivery = NatsDelivery(Message("s", b"x", "$JS.ACK.r"), TOLD, 1.5, wire)
    await delivery.in_progress()
    await delivery.ack()
    await delivery.term()
    await delivery.in_progress()
    assert [(message.subject, message.payload) for message in wire.sent] == [("$JS.ACK.r", b"+WPI"), ("$JS.ACK.r", ACK)]


async def test_an_answer_that_did_not_leave_can_be_given_again() -> None:
    wire = FakeWire()
    delivery = NatsDelivery(Message("s", b"x", "$JS.ACK.r"), TOLD, 1.5, wire)
    wire.go_down()
    await delivery.ack()
    wire.come_up()
    await delivery.term()
    assert [message.payload for message in wire.sent] == [TERM]
