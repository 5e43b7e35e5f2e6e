"""A router that joins learns from one that was there: what is booked and who holds what; and two that heard the same tell the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.router import peers
from services.router.peers import IndexPage
from shared.bus.base import Message
from shared.messages.codec import decode, encode
from shared.messages.kv import BlocksRemoved, BlocksStored, KvEventBatch
from shared.messages.router import RouterSnapshot, RouterSnapshotRequest
from shared.messages.subjects import Subjects
from tests.conftest import Buses
from tests.integration.test_router import KEYS, MODEL, Rig, counted, known
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def rig(make_bus: Buses, subjects: Subjects) -> AsyncIterator[Rig]:
    rig = Rig(make_bus, subjects)
    await rig.open()
    async with rig.stack:
        yield rig


async def content(rig: Rig, router: str) -> dict[str, dict[str, list[str]]]:
    """The whole index of a router, over the bus."""
    found: dict[str, dict[str, list[str]]] = {}
    ask: dict[str, Any] = {"cursor": 0}
    while True:
        reply = await rig.bus.request(rig.subjects.router(router, "index"), msgspec.json.encode(ask), timeout_s=5.0)
        page = msgspec.json.decode(reply.payload, type=IndexPage)
        for source, tiers in page.sources.items():
            for tier, keys in tiers.items():
                found.setdefault(source, {}).setdefault(tier, []).extend(keys)
        if page.next_cursor is None:
            return {source: {tier: sorted(keys) for tier, keys in tiers.items()} for source, tiers in found.items()}
        ask = {"cut": page.cut, "cursor": page.next_cursor}


async def test_what_is_booked_and_held_comes_from_a_peer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PAGE_BYTES", 200)
    worker, other = await rig.worker(held=b"".join(KEYS[:5]), max_num_seqs=64), await rig.worker(max_num_seqs=64)
    first = await rig.router()
    await known(first, worker, other)
    await until(lambda: len(first.index) == 5)
    for _ in range(12):
        await rig.submit(100)
    await until(lambda: len(worker.tasks) + len(other.tasks) == 12)
    asked: list[str] = []

    async def silent(name: str) -> bytes:
        asked.append(name)
        return b""

    for one in (worker, other):
        monkeypatch.setattr(one, "_snapshot", lambda _message, name=one.instance: silent(name))
    second = await rig.router()
    await known(second, worker, other)
    assert second.index.dump() == first.index.dump()
    for each in (worker, other):
        ours, theirs = second.loads.workers[each.instance], first.loads.workers[each.instance]
        assert (set(ours.bookings), ours.num_used_blocks) == (set(theirs.bookings), theirs.num_used_blocks)
    assert counted(second, "router_joins") == 1
    assert not asked, "nobody else was asked"


async def test_what_ends_while_it_learns_stays_ended(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.worker(max_num_seqs=64)
    first = await rig.router()
    await known(first, worker)
    requests = [await rig.submit() for _ in range(4)]
    await until(lambda: len(worker.tasks) == 4)
    tell = peers.Peers._page

    async def slow(self: peers.Peers, asked: RouterSnapshotRequest) -> RouterSnapshot:
        page = await tell(self, asked)
        await worker.ends(*requests[:2])
        await until(lambda: len(first.loads.workers[worker.instance].bookings) == 2)
        return page

    monkeypatch.setattr(peers.Peers, "_page", slow)
    second = await rig.router()
    await until(lambda: worker.instance in second.loads.workers)
    booked = {request.msg_id for request in requests[2:]}
    await until(lambda: set(second.loads.workers[worker.instance].bookings) == booked)


@pytest.mark.parametrize("how", ["garbage", "gone"])
async def test_a_peer_that_tells_nothing_costs_nothing_but_a_question_to_each_source(rig: Rig, how: str, monkeypatch: Any) -> None:
    worker = await rig.worker(held=b"".join(KEYS[:5]))
    first = await rig.router()
    await until(lambda: len(first.index) == 5)

    async def tell(self: peers.Peers, message: Message) -> bytes:
        return b"\xff" if how == "garbage" else encode(RouterSnapshot("", [], []))

    monkeypatch.setattr(peers.Peers, "_tell", tell)
    await first._peers.open(first.instance)
    second = await rig.router()
    await until(lambda: len(second.index) == 5)
    await known(second, worker)
    assert counted(second, "router_snapshots") == 1


async def test_a_question_without_sense_is_refused(rig: Rig) -> None:
    router = await rig.router()
    for bad in (b"{", b'{"cursor": "x"}', b'{"other": 1}'):
        reply = await rig.bus.request(rig.subjects.router(router.instance, "index"), bad, timeout_s=5.0)
        assert (reply.payload, reply.headers["slipstream-error"]) == (b"", "malformed_message")
    assert await content(rig, router.instance) == {}


async def test_the_dumps_of_two_routers_are_equal_again_after_loss(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two misses another event; a gap is found with the next one, and the whole content is the same again."""
    monkeypatch.setattr(peers, "PAGE_BYTES", 200)
    worker, other = await rig.worker(held=b"".join(KEYS[:4])), await rig.worker(held=b"".join(KEYS[2:9]))
    routers = [await rig.router(), await rig.router()]
    for router in routers:
        await until(lambda router=router: len(router.index) == 9)
    events = [
        (b"".join(KEYS[:12]), [BlocksStored("device", KEYS[3], b"".join(KEYS[4:12]))]),
        (b"".join(KEYS[3:12]), [BlocksRemoved("device", b"".join(KEYS[:3]))]),
        (b"".join(KEYS[3:13]), [BlocksStored("device", KEYS[11], KEYS[12])]),
    ]
    for number, (held, changed) in enumerate(events, 1):
        worker.held, worker.sequence = held, number
        batch = KvEventBatch(worker.instance, "worker", MODEL, 1, number, list(changed))
        for at, router in enumerate(routers):
            if number != at + 1 and not router.index.apply(batch):
                router._sync._fetch(batch.source)
    truth = {
        worker.instance: {"device": sorted(key.hex() for key in KEYS[3:13])},
        other.instance: {"device": sorted(key.hex() for key in KEYS[2:9])},
    }
    for router in routers:
        await until(lambda router=router: router.index.num_degraded == 0)
        assert await content(rig, router.instance) == truth == router.index.dump()


async def test_a_cut_that_is_read_or_forgotten_is_gone(rig: Rig) -> None:
    router = await rig.router()
    subject = rig.subjects.router(router.instance, "snapshot")
    reply = decode(RouterSnapshot, (await rig.bus.request(subject, encode(RouterSnapshotRequest()), timeout_s=5.0)).payload)
    assert (reply.booked, reply.sources, reply.next_cursor) == ([], [], None)
    again = await rig.bus.request(subject, encode(RouterSnapshotRequest(reply.cut, 1)), timeout_s=5.0)
    assert decode(RouterSnapshot, again.payload).cut == ""
