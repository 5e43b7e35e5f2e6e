"""Events stream in while requests are decided: both get on, and the index holds what the events said until the end."""

from __future__ import annotations

import pytest

from loadtest.bench.router_flood import Feed, decide_in_flood
from loadtest.bench.router_process import EVENT_SOURCE, Router, Size
from shared.messages.kv import KvEventBatch

SMALL = Size(num_tokens=256, num_workers=4, num_blocks=640, num_sketches=100)


async def test_a_feed_gives_everything_in_order() -> None:
    feed = Feed([b"a", b"b", b"c"], batches_per_s=1e6)
    assert [message.payload async for message in feed] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("decisions_per_s", [None, 2000.0])
async def test_everything_is_decided_and_events_are_applied_meanwhile(
    decisions_per_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    router, seen = Router(SMALL, 40), []
    applying = router.index.applying

    def watched(batch: KvEventBatch) -> object:
        seen.append(batch.source)
        return applying(batch)

    monkeypatch.setattr(router.index, "applying", watched)
    flood = await decide_in_flood(router, 10_000.0, 1, decisions_per_s)
    assert len(flood.waited_us) == 40 and (flood.waited_us > 0).all() and flood.blocks_per_s > 0
    assert seen and set(seen) == {EVENT_SOURCE}
    assert router.index.state_of(EVENT_SOURCE) is None
    assert not any(state.bookings for state in router.loads.workers.values())
