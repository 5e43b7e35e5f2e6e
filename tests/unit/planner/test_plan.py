"""One plan, whoever plans."""

from collections.abc import AsyncIterator

import pytest

from services.planner.plan import PlanRecord
from shared.bus.base import Bucket, Entry
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.bus.memory_stream import MemoryBucket
from shared.messages.codec import decode
from shared.messages.fleet import Plan
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry

SUBJECTS = Subjects("ss")
PLAN = Plan(0, 1, 2, 8, "observing only", {"requests_per_s": 1.5})


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBus(MemoryBroker())
    yield made
    await made.close()


@pytest.fixture
async def bucket(bus: MemoryBus) -> Bucket:
    return await bus.bucket(SUBJECTS.bucket("config"))


async def test_a_plan_is_stored_and_told(bus: MemoryBus, bucket: Bucket) -> None:
    telemetry = NullTelemetry()
    told = await bus.subscribe(SUBJECTS.plan())
    record = PlanRecord(bus, SUBJECTS, telemetry)
    assert (await record.publish(PLAN)) == Plan(1, 1, 2, 8, "observing only", {"requests_per_s": 1.5})
    second = await record.publish(PLAN)
    assert second is not None
    assert second.sequence == 2
    entry = await bucket.get("plan")
    assert entry is not None
    assert entry.value is not None
    assert decode(Plan, entry.value) == second
    messages = aiter(told)
    assert [decode(Plan, (await anext(messages)).payload).sequence for _ in range(2)] == [1, 2]
    assert telemetry.total("planner_plans") == 2


async def test_numbers_go_on_after_a_restart(bus: MemoryBus) -> None:
    await PlanRecord(bus, SUBJECTS, NullTelemetry()).publish(PLAN)
    after = await PlanRecord(bus, SUBJECTS, NullTelemetry()).publish(PLAN)
    assert after is not None
    assert after.sequence == 2


@pytest.mark.parametrize("is_there_already", [False, True])
async def test_who_writes_second_gives_way(bus: MemoryBus, bucket: Bucket, monkeypatch: pytest.MonkeyPatch, is_there_already: bool) -> None:
    """Both read before either writes."""
    telemetry = NullTelemetry()
    record = PlanRecord(bus, SUBJECTS, telemetry)
    if is_there_already:
        await record.publish(PLAN)
    before = await bucket.get("plan")

    async def read_too_early(*_: object) -> Entry | None:
        return before

    await PlanRecord(bus, SUBJECTS, NullTelemetry()).publish(PLAN)
    told = await bus.subscribe(SUBJECTS.plan())
    with monkeypatch.context() as patch:
        patch.setattr(MemoryBucket, "get", read_too_early)
        assert await record.publish(PLAN) is None
    assert telemetry.total("planner_conflicts") == 1
    third = await record.publish(PLAN)
    assert third is not None
    assert decode(Plan, (await anext(aiter(told))).payload) == third, "what was not written was not told"


async def test_a_plan_that_cannot_be_read_is_replaced_and_counted(bus: MemoryBus, bucket: Bucket) -> None:
    telemetry = NullTelemetry()
    await bucket.put("plan", b"\xc1")
    plan = await PlanRecord(bus, SUBJECTS, telemetry).publish(PLAN)
    assert plan is not None
    assert plan.sequence == 1
    assert telemetry.total("planner_malformed", kind="plan") == 1
