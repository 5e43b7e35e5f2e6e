"""The order of a life, over a memory bus: what others see of it, and what is undone when it goes wrong."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import ServiceConfig
from shared.errors import EnvironmentFault, NoResponders
from shared.fleet import Fleet
from shared.messages.subjects import Subjects
from shared.service import run_service
from shared.telemetry import NullTelemetry
from tests.support.probe_service import Behaviour, ProbeConfig, ProbeService
from tests.support.waiting import until

SUBJECTS = Subjects("ss")


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    made = MemoryBus(broker)
    yield made
    await made.close()


@pytest.fixture
async def witness(broker: MemoryBroker) -> AsyncIterator[Fleet]:
    """Another process that watches."""
    bus = MemoryBus(broker)
    fleet = Fleet(bus, SUBJECTS, NullTelemetry())
    await fleet.open()
    yield fleet
    await fleet.close()
    await bus.close()


def make_service(bus: MemoryBus, behaviour: Behaviour = "", drain_s: float = 20.0) -> ProbeService:
    config = ProbeConfig(service=ServiceConfig(name="decode-0", drain_s=drain_s), behaviour=behaviour)
    return ProbeService(config, bus, NullTelemetry(), "aaaaaaaa")


def named_tasks() -> list[str]:
    """Tasks that somebody gave a name: those of services."""
    return sorted(name for task in asyncio.all_tasks() if not (name := task.get_name()).startswith("Task-"))


async def test_from_starting_to_gone(bus: MemoryBus, witness: Fleet) -> None:
    seen: list[str] = []
    witness.on_change(lambda lease, is_alive: seen.append(lease.state if is_alive else "gone"))
    service = make_service(bus)
    async with run_service(service):
        await until(lambda: "ready" in seen)
        lease = witness.get("aaaaaaaa")
        assert lease is not None
        assert (lease.role, lease.name, lease.started_at_ns > 0, lease.pid > 0) == ("decode", "decode-0", True, True)
        assert service.calls == ["start"]
        assert service.fleet.is_alive("aaaaaaaa"), "its own view is open"
    await until(lambda: "gone" in seen)
    assert service.calls == ["start", "drain", "stop"]
    assert seen[-1] == "gone"


async def test_no_task_is_left(bus: MemoryBus) -> None:
    before = named_tasks()
    async with run_service(make_service(bus)):
        pass
    assert named_tasks() == before


async def test_reports_of_the_start_reach_whoever_listens(bus: MemoryBus) -> None:
    service, reports = make_service(bus), []
    service.on_report = lambda text, fraction: reports.append((text, fraction))
    async with run_service(service):
        pass
    assert reports == [("loading the model", 0.5)]


@pytest.mark.parametrize(("behaviour", "error"), [("fault", EnvironmentFault), ("bug", ZeroDivisionError)])
async def test_a_start_that_fails_leaves_nothing_behind(
    bus: MemoryBus, witness: Fleet, behaviour: Behaviour, error: type[Exception]
) -> None:
    service = make_service(bus, behaviour)
    before = named_tasks()
    with pytest.raises(error):
        async with run_service(service):
            pytest.fail("it cannot be ready")
    assert service.calls == ["start"]
    assert named_tasks() == before
    assert await (await bus.bucket(SUBJECTS.bucket("workers"))).entries() == []


async def test_a_task_that_fails_ends_the_service(bus: MemoryBus, caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(bus, "crash")
    with pytest.raises(ZeroDivisionError, match="a bug in a task"):
        async with run_service(service):
            await service.crashed.wait()
    assert service.calls == ["start"], "nothing is drained after a crash"
    assert service.telemetry.total("task_crashes") == 1  # type: ignore[attr-defined]  # NullTelemetry
    assert "task crasher failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_drain_has_its_time_and_no_more(bus: MemoryBus, caplog: pytest.LogCaptureFixture) -> None:
    service = make_service(bus, "slow_drain", drain_s=0.01)
    async with run_service(service):
        pass
    assert service.calls == ["start", "drain", "stop"]
    assert "not drained" in caplog.text


async def test_a_lost_lease_is_told_and_comes_back_under_a_new_name(bus: MemoryBus, broker: MemoryBroker, witness: Fleet) -> None:
    other = make_service(bus)
    other.instance = "bbbbbbbb"
    service = make_service(MemoryBus(broker))
    async with run_service(other), run_service(service):
        bucket = await bus.bucket(SUBJECTS.bucket("workers"))
        await bucket.delete("decode.aaaaaaaa")
        await until(lambda: service.instance != "aaaaaaaa" and witness.is_alive(service.instance))
        assert "lease_lost" in service.calls
        assert not witness.is_alive("aaaaaaaa")
        lease = witness.get(service.instance)
        assert lease is not None
        assert lease.state == "ready"
        assert other.calls == ["start"]
    assert service.telemetry.total("leases_lost") == 1  # type: ignore[attr-defined]  # NullTelemetry
    await service.bus.close()


async def test_whoever_asks_finds_it_while_it_takes_work(bus: MemoryBus, broker: MemoryBroker) -> None:
    asker = MemoryBus(broker)
    async with run_service(make_service(bus)):
        reply = await asker.request("$SRV.INFO.slipstream-decode.aaaaaaaa", b"", timeout_s=5)
        told = json.loads(reply.payload)
        assert (told["name"], told["id"], told["metadata"]["name"]) == ("slipstream-decode", "aaaaaaaa", "decode-0")
    with pytest.raises(NoResponders):
        await asker.request("$SRV.PING", b"", timeout_s=5)
    await asker.close()


async def test_what_the_bus_counts_comes_out_as_a_metric(bus: MemoryBus) -> None:
    service = make_service(bus)
    telemetry = service.telemetry
    assert isinstance(telemetry, NullTelemetry)
    async with run_service(service):
        bus.counts["permission_denied"] += 2
        await until(lambda: telemetry.total("bus_events", event="permission_denied"))
        bus.counts["permission_denied"] += 1
        await until(lambda: telemetry.total("bus_events", event="permission_denied") == 3)
        assert telemetry.observations[("event_loop_lag_seconds", ())]
