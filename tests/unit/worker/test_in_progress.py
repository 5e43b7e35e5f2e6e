"""What is held is told of, and nothing else waits for all of it."""

from __future__ import annotations

import asyncio

import pytest

from shared.worker import intake
from shared.worker.intake import IN_PROGRESS_ROUND, keep_in_progress
from tests.support.fake_delivery import FakeDelivery


async def test_others_have_their_turn_while_many_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "IN_PROGRESS_S", 0.0)
    held, seen = [FakeDelivery() for _ in range(4 * IN_PROGRESS_ROUND)], set[int]()
    keeping = asyncio.create_task(keep_in_progress(lambda: held))
    while not all(delivery.done for delivery in held):
        await asyncio.sleep(0)
        seen.add(sum(1 for delivery in held if delivery.done))
    keeping.cancel()
    await asyncio.wait([keeping])
    assert len(seen) >= 4, "not all at once"
