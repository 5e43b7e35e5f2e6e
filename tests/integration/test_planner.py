"""The planner as a process, on a real NATS."""

import signal
from pathlib import Path

from shared.messages.codec import decode, encode
from shared.messages.fleet import Plan
from shared.messages.subjects import Subjects
from tests.support.events import make_usage
from tests.support.nats import NatsServer, connect_to, delete_streams
from tests.support.process import ServiceProcess


async def test_plans_come_out_while_it_runs(nats_server: NatsServer, subjects: Subjects, tmp_path: Path) -> None:
    bus = await connect_to(nats_server.url, subjects.namespace)
    told = aiter(await bus.subscribe(subjects.plan()))
    environ = {"SS_NATS_URL": nats_server.url, "SS_NAMESPACE": subjects.namespace, "SS_PLAN_EVERY_S": "0.1"}
    process = await ServiceProcess.start("services.planner", environ)
    try:
        assert (await process.until_state("ready"))["detail"] == "observing only"
        assert await bus.enqueue(subjects.usage_event("dddddddd"), encode(make_usage()), msg_id="1")
        plan = decode(Plan, (await anext(told)).payload)
        while not plan.observed["requests_per_s"]:
            plan = decode(Plan, (await anext(told)).payload)
        assert plan.observed["ttft_attainment"] == 1
        entry = await (await bus.bucket(subjects.bucket("config"))).get("plan")
        assert entry is not None
        assert entry.value is not None
        assert decode(Plan, entry.value).sequence >= plan.sequence
        process.send(signal.SIGTERM)
        assert await process.ended() == 0
        assert [line for line in await process.log() if line["level"] != "info"] == []
    finally:
        await process.close()
        await bus.close()
        await delete_streams(nats_server.url, subjects.namespace)
