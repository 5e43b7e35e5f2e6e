"""The planner over a memory bus: it hears everybody, and one of several speaks."""

from collections.abc import AsyncIterator

import pytest

from services.planner.config import PlannerConfig
from services.planner.service import PlannerService
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.config import ServiceConfig, read_config
from shared.errors import ConfigError
from shared.messages.codec import encode
from shared.messages.fleet import Plan
from shared.messages.subjects import Subjects
from shared.service import run_service
from shared.telemetry import NullTelemetry
from tests.support.events import make_load, make_route, make_usage
from tests.support.leases import make_lease, put_lease
from tests.support.waiting import until

SUBJECTS = Subjects("ss")


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    """Everybody else's."""
    made = MemoryBus(broker)
    yield made
    await made.close()


def make_planner(broker: MemoryBroker, instance: str = "cccccccc", plan_every_s: float = 3600) -> tuple[PlannerService, NullTelemetry]:
    telemetry = NullTelemetry()
    config = PlannerConfig(service=ServiceConfig(), plan_every_s=plan_every_s)
    return PlannerService(config, MemoryBus(broker), telemetry, instance), telemetry


async def test_it_says_what_is_there(broker: MemoryBroker, bus: MemoryBus) -> None:
    planner, telemetry = make_planner(broker)
    await put_lease(bus, SUBJECTS, make_lease("aaaaaaaa", max_num_seqs=8))
    await put_lease(bus, SUBJECTS, make_lease("bbbbbbbb", role="prefill"))
    async with run_service(planner):
        await bus.publish(SUBJECTS.load_event("aaaaaaaa"), encode(make_load(num_waiting=7)))
        await bus.publish(SUBJECTS.route_event("eeeeeeee"), encode(make_route()))
        await bus.publish(SUBJECTS.usage_event("dddddddd"), encode(make_usage()))
        await until(lambda: telemetry.total("planner_events") == 3)
        plan = await planner.plan()
    assert plan is not None
    assert (plan.num_prefill, plan.num_decode, plan.max_num_seqs, plan.reason) == (1, 1, 8, "observing only")
    assert plan.observed["decode_waiting"] == 7
    assert plan.observed["requests_per_s"] > 0
    assert plan.observed["ttft_attainment"] == 1
    assert telemetry.gauges[("planner_workers", (("role", "decode"),))] == 1
    assert telemetry.gauges[("planner_observed", (("what", "ttft_attainment"),))] == 1
    await planner.bus.close()


async def test_it_publishes_again_and_again(broker: MemoryBroker, bus: MemoryBus) -> None:
    planner, telemetry = make_planner(broker, plan_every_s=0.05)
    async with run_service(planner):
        await until(lambda: telemetry.total("planner_plans") >= 3)
    await planner.bus.close()


async def test_what_cannot_be_read_is_counted_and_the_rest_is_taken(broker: MemoryBroker, bus: MemoryBus) -> None:
    planner, telemetry = make_planner(broker)
    async with run_service(planner):
        await bus.publish(SUBJECTS.usage_event("dddddddd"), b"rubbish")
        await bus.publish(SUBJECTS.usage_event("dddddddd"), encode(make_load()))
        await bus.publish(SUBJECTS.usage_event("dddddddd"), encode(make_usage()))
        await until(lambda: telemetry.total("planner_events", kind="usage") == 1)
    assert telemetry.total("planner_malformed", kind="usage") == 2
    await planner.bus.close()


async def test_the_load_of_a_worker_that_is_gone_is_forgotten(broker: MemoryBroker, bus: MemoryBus) -> None:
    planner, telemetry = make_planner(broker)
    await put_lease(bus, SUBJECTS, make_lease("aaaaaaaa"))
    async with run_service(planner):
        await bus.publish(SUBJECTS.load_event("aaaaaaaa"), encode(make_load()))
        await until(lambda: telemetry.total("planner_events") == 1)
        await (await bus.bucket(SUBJECTS.bucket("workers"))).delete("decode.aaaaaaaa")
        await until(lambda: not planner.fleet.is_alive("aaaaaaaa"))
        plan = await planner.plan()
    assert plan is not None
    assert (plan.num_decode, plan.observed["decode_running"]) == (0, 0)
    await planner.bus.close()


async def test_the_eldest_of_two_speaks_and_the_other_takes_over(broker: MemoryBroker, bus: MemoryBus) -> None:
    elder, _ = make_planner(broker, "cccccccc")
    younger, telemetry = make_planner(broker, "dddddddd")
    async with run_service(younger):
        async with run_service(elder):
            both = {"cccccccc", "dddddddd"}
            await until(lambda: all({lease.instance for lease in each.fleet.workers("planner")} == both for each in (elder, younger)))
            assert await younger.plan() is None
            first = await elder.plan()
        await until(lambda: not younger.fleet.is_alive("cccccccc"))
        second = await younger.plan()
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert second.sequence == first.sequence + 1
    assert telemetry.total("planner_conflicts") == 0
    for each in (elder, younger):
        await each.bus.close()


async def test_a_bus_that_is_cut_off_costs_plans_and_nothing_else(broker: MemoryBroker, bus: MemoryBus) -> None:
    planner, telemetry = make_planner(broker, plan_every_s=0.05)
    own = planner.bus
    assert isinstance(own, MemoryBus)
    async with run_service(planner):
        await until(lambda: telemetry.total("planner_plans") >= 1)
        own.cut()
        own.mend()
        told = telemetry.total("planner_plans")
        await until(lambda: telemetry.total("planner_plans") > told)
    await own.close()


@pytest.mark.parametrize("variable", ["SS_SLO_TTFT_MS", "SS_SLO_ITL_MS", "SS_PLAN_EVERY_S"])
def test_targets_are_positive(variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        read_config(PlannerConfig, {variable: "0"})


def test_targets_come_from_the_environment() -> None:
    config = read_config(PlannerConfig, {"SS_SLO_TTFT_MS": "500", "SS_SLO_ITL_MS": "40"})
    assert (config.slo_ttft_ms, config.slo_itl_ms) == (500, 40)
