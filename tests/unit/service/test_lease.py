"""A process's own lease: when it is lost, and when it only looks so."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import pytest

from shared.bus.base import Bucket
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_stream import MemoryBucket
from shared.errors import BusTimeout
from shared.messages.codec import decode
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.service.lease import OwnLease
from shared.telemetry import NullTelemetry
from tests.support.leases import Clock, make_lease, put_lease

SUBJECTS = Subjects("ss")


@dataclass
class World:
    """One process's lease, and the bucket as others see it."""

    clock: Clock
    broker: MemoryBroker
    bus: MemoryBus
    others: MemoryBus
    bucket: Bucket
    telemetry: NullTelemetry
    lease: OwnLease
    described: list[WorkerLease]

    async def stored(self, key: str = "decode.aaaaaaaa") -> WorkerLease | None:
        entry = await self.bucket.get(key)
        return decode(WorkerLease, entry.value) if entry and entry.value else None


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = Clock()
    broker = MemoryBroker(clock)
    bus, others, telemetry = MemoryBus(broker), MemoryBus(broker), NullTelemetry()
    described = [make_lease()]
    name = SUBJECTS.bucket("workers")
    lease = OwnLease(await bus.bucket(name), bus.clock, lambda: described[-1], telemetry, clock)
    yield World(clock, broker, bus, others, await others.bucket(name), telemetry, lease, described)
    await others.close()
    await bus.close()


async def test_each_renewal_has_the_state_and_the_next_sequence(world: World) -> None:
    await world.lease.begin()
    assert await world.stored() == make_lease(state="starting", sequence=1)
    world.lease.state = "ready"
    for sequence in (2, 3):
        world.clock.advance(1)
        assert await world.lease.renew()
        assert await world.stored() == make_lease(state="ready", sequence=sequence)


async def test_the_end_is_visible_at_once(world: World) -> None:
    await world.lease.end()
    await world.lease.begin()
    await world.lease.end()
    assert await world.stored() is None


async def test_a_process_that_stood_still_has_lost_its_lease(world: World) -> None:
    await world.lease.begin()
    world.clock.advance(3.1)
    assert not await world.lease.renew()
    assert await world.stored() is None, "nothing was written under the old name"


async def test_a_stand_still_counts_though_the_link_clock_forgave_it(world: World) -> None:
    """The link clock cannot tell a process that stood still from a server that was silent."""
    await world.lease.begin()
    world.bus.clock.link_down()
    world.clock.advance(3.1)
    world.bus.clock.link_up()
    assert await world.lease.renew(), "a silent server is forgiven"
    await world.lease.begin()
    world.bus.clock.link_down()
    world.clock.advance(3.1)
    world.bus.clock.link_up()
    world.lease.stood_still(3.0)
    assert not await world.lease.renew()
    await world.lease.begin()
    assert await world.lease.renew()


async def test_a_stand_still_is_noticed_after_a_renewal_too(world: World) -> None:
    """Which of two timers that are due fires first is chance."""
    await world.lease.begin()
    world.bus.clock.link_down()
    world.clock.advance(3.1)
    world.bus.clock.link_up()
    assert await world.lease.renew()
    world.lease.stood_still(3.0)
    assert not await world.lease.renew()


async def test_a_short_stand_still_is_no_loss(world: World) -> None:
    await world.lease.begin()
    world.clock.advance(2.5)
    world.lease.stood_still(2.4)
    assert await world.lease.renew()


async def test_a_key_that_expired_while_others_went_on_is_lost(world: World) -> None:
    """The link clock stood still, so it says nothing; but the bucket lived without us."""
    await world.lease.begin()
    world.bus.cut()
    world.clock.advance(5)
    await put_lease(world.others, SUBJECTS, make_lease("bbbbbbbb"))
    world.bus.mend()
    assert not await world.lease.renew()


async def test_a_key_that_somebody_deleted_is_lost(world: World) -> None:
    await world.lease.begin()
    await world.bucket.delete("decode.aaaaaaaa")
    await put_lease(world.others, SUBJECTS, make_lease("bbbbbbbb"))
    assert not await world.lease.renew()


async def test_an_outage_of_the_broker_is_no_loss(world: World) -> None:
    """The bucket lies in memory: it comes back empty, and everybody writes again."""
    for _ in range(10):
        await world.lease.begin()
    world.bus.cut()
    world.broker.wipe()
    world.clock.advance(30)
    world.bus.mend()
    await put_lease(world.others, SUBJECTS, make_lease("bbbbbbbb"))
    assert await world.lease.renew()
    assert await world.stored() is not None


async def test_a_wiped_bucket_is_no_loss(world: World) -> None:
    await world.lease.begin()
    world.broker.wipe()
    assert await world.lease.renew()
    assert await world.stored() == make_lease(state="starting", sequence=3)


async def test_an_update_whose_answer_was_lost_is_found_again(world: World) -> None:
    await world.lease.begin()
    await put_lease(world.others, SUBJECTS, make_lease(state="starting", sequence=2))
    assert await world.lease.renew()
    assert await world.lease.renew()


async def test_a_renewal_that_fails_is_counted_and_the_clock_decides(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> int:
        raise BusTimeout("x", 1.0)

    await world.lease.begin()
    monkeypatch.setattr(MemoryBucket, "update", refuse)
    world.clock.advance(2)
    assert await world.lease.renew()
    world.clock.advance(1.5)
    assert not await world.lease.renew()
    assert world.telemetry.total("lease_renewal_failures", reason="bus_timeout") == 1


async def test_a_new_instance_takes_the_old_key_away(world: World) -> None:
    await world.lease.begin()
    world.described.append(msgspec.structs.replace(make_lease(), instance="bbbbbbbb"))
    await world.lease.begin()
    assert await world.stored() is None
    assert await world.stored("decode.bbbbbbbb") is not None
    assert await world.lease.renew()
