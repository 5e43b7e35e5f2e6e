"""The order of waiting: class, tenant share, priority, age."""

from __future__ import annotations

from typing import Any

import msgspec

from services.router.queue import Waiting, WaitingQueue
from tests.support.fake_delivery import FakeDelivery, make_request


def waiting(number: int, tenant: str = "0", **fields: Any) -> Waiting:
    request = msgspec.structs.replace(make_request(number, [1, 2, 3]), partition=tenant * 16, **fields)
    return Waiting(request, FakeDelivery(), 0.0)


def take_all(queue: WaitingQueue) -> list[int]:
    """Route everything, one after the other, as the loop does."""
    order = []
    while len(queue):
        one = next(queue.in_order())
        order.append(int(one.request.request_id, 16))
        queue.routed(one)
    return order


def test_class_before_priority_before_age() -> None:
    queue = WaitingQueue()
    for one in (
        waiting(1),
        waiting(2, request_class="batch"),
        waiting(3, request_class="high"),
        waiting(4, priority=-5),
        waiting(5),
    ):
        queue.add(one)
    assert take_all(queue) == [3, 4, 1, 5, 2]


def test_tenants_take_turns_however_many_requests_one_has() -> None:
    queue = WaitingQueue()
    for number in range(4):
        queue.add(waiting(number, "a"))
    queue.add(waiting(10, "b"))
    queue.add(waiting(11, "b"))
    order = take_all(queue)
    assert set(order[:2]) == {0, 10}
    assert set(order[:4]) == {0, 1, 10, 11}


def test_a_look_changes_nothing() -> None:
    queue = WaitingQueue()
    for number in range(5):
        queue.add(waiting(number))
    assert [int(one.request.request_id, 16) for one in queue.in_order()] == list(range(5))
    next(queue.in_order())
    assert take_all(queue) == list(range(5))


def test_a_redelivery_takes_the_place_of_the_delivery() -> None:
    queue = WaitingQueue()
    first, again = waiting(1), waiting(1)
    assert queue.add(first)
    assert not queue.add(again)
    assert len(queue) == 1
    assert next(iter(queue)).delivery is again.delivery


def test_what_is_removed_is_skipped() -> None:
    queue = WaitingQueue()
    gone, stays = waiting(1), waiting(2)
    queue.add(gone)
    queue.add(stays)
    queue.remove(gone)
    assert take_all(queue) == [2]
