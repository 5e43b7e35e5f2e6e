"""Who is alive: only news counts, and only while we could have heard it."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.fleet import Fleet
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.leases import Clock, make_lease, put_lease
from tests.support.waiting import until

SUBJECTS = Subjects("ss")


@dataclass
class World:
    """A fleet, the bus that it reads by, and the bus of everybody else."""

    clock: Clock
    broker: MemoryBroker
    bus: MemoryBus
    others: MemoryBus
    telemetry: NullTelemetry
    fleet: Fleet
    changes: list[tuple[str, str, bool]]

    async def put(self, lease: WorkerLease) -> None:
        await put_lease(self.others, SUBJECTS, lease)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock = Clock()
    broker = MemoryBroker(clock)
    bus, telemetry = MemoryBus(broker), NullTelemetry()
    made = World(clock, broker, bus, MemoryBus(broker), telemetry, Fleet(bus, SUBJECTS, telemetry), [])
    made.fleet.on_change(lambda lease, is_alive: made.changes.append((lease.instance, lease.state, is_alive)))
    yield made
    await made.fleet.close()
    await made.others.close()
    await made.bus.close()


async def test_who_is_there_is_known_when_open_returns(world: World) -> None:
    await world.put(make_lease())
    await world.fleet.open()
    assert world.fleet.workers("decode") == [make_lease()]
    assert world.fleet.get("aaaaaaaa") == make_lease()
    assert world.fleet.is_alive("aaaaaaaa")
    assert world.telemetry.gauges[("fleet_size", (("role", "decode"),))] == 1


async def test_workers_are_those_that_are_ready_and_serve_the_model(world: World) -> None:
    await world.put(make_lease("aaaaaaaa", started_at_ns=5))
    await world.put(make_lease("bbbbbbbb", started_at_ns=4, model="f" * 16))
    await world.put(make_lease("cccccccc", state="draining"))
    await world.put(make_lease("dddddddd", role="prefill"))
    await world.put(make_lease("eeeeeeee", state="starting"))
    await world.fleet.open()
    assert [lease.instance for lease in world.fleet.workers("decode")] == ["bbbbbbbb", "aaaaaaaa"], "oldest first"
    assert [lease.instance for lease in world.fleet.workers("decode", "f" * 16)] == ["bbbbbbbb"]
    assert world.fleet.is_alive("cccccccc")
    assert len(world.fleet.alive()) == 5


async def test_a_change_is_told_and_a_renewal_is_not(world: World) -> None:
    await world.fleet.open()
    for sequence, state in enumerate(("starting", "starting", "ready", "ready", "draining"), start=1):
        await world.put(make_lease(sequence=sequence, state=state))
        await put_lease(world.others, SUBJECTS, make_lease(f"{sequence:08x}", role="router"))
        await until(lambda sequence=sequence: world.fleet.is_alive(f"{sequence:08x}"))
    told = [change for change in world.changes if change[0] == "aaaaaaaa"]
    assert told == [("aaaaaaaa", state, True) for state in ("starting", "ready", "draining")]


async def test_a_deleted_lease_ends_at_once(world: World) -> None:
    await world.put(make_lease())
    await world.fleet.open()
    await (await world.others.bucket(SUBJECTS.bucket("workers"))).delete("decode.aaaaaaaa")
    await until(lambda: not world.fleet.is_alive("aaaaaaaa"))
    assert world.changes[-1] == ("aaaaaaaa", "ready", False)
    assert world.telemetry.total("fleet_expired") == 0


async def test_a_lease_that_is_not_renewed_ends_after_three_seconds(world: World) -> None:
    await world.put(make_lease())
    await world.fleet.open()
    world.clock.advance(3.0)
    world.fleet.sweep()
    assert world.fleet.is_alive("aaaaaaaa")
    world.clock.advance(0.1)
    world.fleet.sweep()
    assert not world.fleet.is_alive("aaaaaaaa")
    assert world.changes[-1] == ("aaaaaaaa", "ready", False)
    assert world.telemetry.total("fleet_expired", role="decode") == 1
    assert world.telemetry.gauges[("fleet_size", (("role", "decode"),))] == 0


async def test_nobody_dies_while_we_are_cut_off_nor_right_after(world: World) -> None:
    await world.put(make_lease())
    await world.fleet.open()
    world.bus.cut()
    world.clock.advance(60)
    world.fleet.sweep()
    assert world.fleet.is_alive("aaaaaaaa")
    world.bus.mend()
    world.clock.advance(1.9)
    world.fleet.sweep()
    assert world.fleet.is_alive("aaaaaaaa"), "its next renewal may still be on its way"
    world.clock.advance(3.2)
    world.fleet.sweep()
    assert not world.fleet.is_alive("aaaaaaaa")


async def test_an_old_copy_neither_renews_nor_revives(world: World) -> None:
    await world.put(make_lease(sequence=7))
    await world.fleet.open()
    world.clock.advance(2)
    await world.put(make_lease(sequence=7))
    await world.put(make_lease("bbbbbbbb"))
    await until(lambda: world.fleet.is_alive("bbbbbbbb"))
    world.clock.advance(1.5)
    world.fleet.sweep()
    assert not world.fleet.is_alive("aaaaaaaa"), "a repeated entry is no sign of life"
    await world.put(make_lease(sequence=7))
    await world.put(make_lease("cccccccc"))
    await until(lambda: world.fleet.is_alive("cccccccc"))
    assert not world.fleet.is_alive("aaaaaaaa")


async def test_a_process_that_comes_back_is_told_again(world: World) -> None:
    await world.put(make_lease(sequence=7))
    await world.fleet.open()
    world.clock.advance(3.5)
    world.fleet.sweep()
    await world.put(make_lease(sequence=8))
    await until(lambda: world.fleet.is_alive("aaaaaaaa"))
    assert [is_alive for _, _, is_alive in world.changes] == [True, False, True]


async def test_a_wiped_bucket_kills_nobody_who_writes_again(world: World) -> None:
    await world.put(make_lease(sequence=100))
    await world.fleet.open()
    world.broker.wipe()
    await world.put(make_lease(sequence=101))
    await world.put(make_lease("bbbbbbbb"))
    await until(lambda: world.fleet.is_alive("bbbbbbbb"))
    world.clock.advance(2.9)
    world.fleet.sweep()
    assert world.fleet.is_alive("aaaaaaaa")


async def test_what_is_no_lease_is_counted_and_left_out(world: World) -> None:
    await (await world.others.bucket(SUBJECTS.bucket("workers"))).put("decode.bbbbbbbb", b"\x91\xa3abc")
    await world.put(make_lease())
    await world.fleet.open()
    assert [lease.instance for lease in world.fleet.alive()] == ["aaaaaaaa"]
    assert world.telemetry.total("fleet_malformed") > 0


async def test_a_late_listener_hears_of_everybody(world: World) -> None:
    await world.put(make_lease())
    await world.fleet.open()
    heard: list[str] = []
    world.fleet.on_change(lambda lease, is_alive: heard.append(lease.instance))
    assert heard == ["aaaaaaaa"]


async def test_ended_leases_are_not_remembered_for_ever(world: World) -> None:
    await world.put(make_lease(sequence=7))
    await world.fleet.open()
    world.clock.advance(3.5)
    world.fleet.sweep()
    world.clock.advance(61)
    world.fleet.sweep()
    await world.put(make_lease(sequence=1))
    await until(lambda: world.fleet.is_alive("aaaaaaaa"))
