"""A service as a process: signals, exit codes, and what others see, on a real NATS."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from shared.fleet import Fleet
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.nats import NatsServer, connect_to, delete_streams
from tests.support.process import ROOT, ServiceProcess
from tests.support.proxy import Proxy
from tests.support.waiting import until

PROBE = "tests.support.probe_service"
Start = Callable[..., Awaitable[ServiceProcess]]


@pytest.fixture
async def start(nats_server: NatsServer, namespace: str) -> AsyncIterator[Start]:
    """Starts probe services; `start(behaviour, SS_X="...")`."""
    started: list[ServiceProcess] = []

    async def make(behaviour: str = "", **environ: str) -> ServiceProcess:
        variables = {"SS_NATS_URL": nats_server.url, "SS_NAMESPACE": namespace, "SS_NAME": "probe", "SS_BEHAVIOUR": behaviour}
        started.append(await ServiceProcess.start(PROBE, variables | environ))
        return started[-1]

    yield make
    for process in started:
        await process.close()
    await delete_streams(nats_server.url, namespace)


@pytest.fixture
async def witness(nats_server: NatsServer, subjects: Subjects) -> AsyncIterator[Fleet]:
    """Another process that watches."""
    bus = await connect_to(nats_server.url, subjects.namespace)
    fleet = Fleet(bus, subjects, NullTelemetry())
    await fleet.open()
    yield fleet
    await fleet.close()
    await bus.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_from_ready_to_gone(start: Start, witness: Fleet, tmp_path: Path, number: signal.Signals) -> None:
    seen: list[str] = []
    witness.on_change(lambda lease, is_alive: seen.append(lease.state if is_alive else "gone"))
    process = await start(SS_TRACE_DIR=str(tmp_path))
    ready = await process.until_state("ready")
    assert ready["detail"] == "at your service"
    assert [status["text"] for status in process.statuses if status["state"] == "phase"] == ["connecting to NATS", "loading the model"]
    await until(lambda: "ready" in seen)
    lease: WorkerLease = witness.workers("decode")[0]
    assert (lease.name, lease.pid) == ("probe", process.process.pid)
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"http://{lease.metrics_address}/metrics").read().decode())
    assert f'slipstream_service_info{{instance="{lease.instance}",name="probe",role="decode",version="{lease.version}"}} 1.0' in page
    process.send(number)
    assert await process.ended() == 0
    await until(lambda: "gone" in seen)
    assert seen[-1] == "gone", "the lease was deleted; nobody had to wait for its end"
    spans = [json.loads(line) for line in (tmp_path / "probe.jsonl").read_text().splitlines()]
    assert [span["name"] for span in spans] == ["stop"], "what was recorded last is written too"
    assert all(line["level"] == "info" for line in await process.log())


async def test_the_ready_file_is_renewed_with_the_lease_and_gone_when_draining(start: Start, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = await start("slow_drain", SS_READY_FILE=str(ready))
    await process.until_state("ready")
    first_ns = ready.stat().st_mtime_ns
    await until(lambda: ready.stat().st_mtime_ns > first_ns)
    process.send(signal.SIGTERM)
    await until(lambda: not ready.exists())
    process.send(signal.SIGTERM)
    assert await process.ended() == 130


async def test_a_ready_file_that_cannot_be_written_is_a_warning(start: Start, tmp_path: Path) -> None:
    process = await start(SS_READY_FILE=str(tmp_path / "absent" / "ready"))
    await process.until_state("ready")
    process.send(signal.SIGTERM)
    assert await process.ended() == 0
    assert any("ready file" in line["message"] and line["level"] == "warning" for line in await process.log())


async def test_a_service_that_is_asked_to_leave_drains_and_ends(start: Start, witness: Fleet) -> None:
    seen: list[str] = []
    witness.on_change(lambda lease, is_alive: seen.append(lease.state if is_alive else "gone"))
    process = await start("leave")
    assert await process.ended() == 0
    await until(lambda: seen[-1:] == ["gone"])
    assert seen[-3:] == ["ready", "draining", "gone"]


async def test_a_second_signal_does_not_wait_for_the_drain(start: Start, witness: Fleet) -> None:
    process = await start("slow_drain")
    await process.until_state("ready")
    process.send(signal.SIGTERM)
    await until(lambda: any(lease.state == "draining" for lease in witness.alive()))
    process.send(signal.SIGTERM)
    assert await process.ended() == 130


async def test_a_drain_that_takes_too_long_is_given_up(start: Start) -> None:
    process = await start("slow_drain", SS_DRAIN_S="0.1")
    await process.until_state("ready")
    process.send(signal.SIGTERM)
    assert await process.ended() == 0


@pytest.mark.parametrize("behaviour", ["hang", "thread"])
async def test_a_start_can_be_given_up(start: Start, witness: Fleet, behaviour: str) -> None:
    process = await start(behaviour)
    while (await process.until_state("phase"))["text"] != "loading the model":
        pass
    process.send(signal.SIGTERM)
    assert await process.ended() == 0
    await until(lambda: not witness.alive())


async def test_waiting_for_nats_can_be_given_up(start: Start) -> None:
    process = await start(SS_NATS_URL="nats://127.0.0.1:1")
    await process.until_state("phase")
    process.send(signal.SIGTERM)
    assert await process.ended() == 0


async def test_a_fault_at_the_start_is_one_line_with_its_remedy(start: Start) -> None:
    process = await start("fault")
    failed = await process.until_state("failed")
    assert failed == {"state": "failed", "code": "environment", "message": "no room on the disk", "remedy": "Make room", "exit": 3}
    assert await process.ended() == 3
    (line,) = [line for line in await process.log() if line["level"] == "error"]
    assert (line["message"], line["remedy"]) == ("no room on the disk", "Make room")
    assert "traceback" not in line


async def test_a_bad_setting_names_its_variable(start: Start) -> None:
    process = await start(SS_METRICS_PORT="many")
    failed = await process.until_state("failed")
    assert failed["message"].startswith("SS_METRICS_PORT='many'")
    assert await process.ended() == 2


async def test_a_bug_at_the_start_leaves_its_traceback(start: Start) -> None:
    process = await start("bug")
    assert (await process.until_state("failed"))["message"] == "a bug: ZeroDivisionError"
    assert await process.ended() == 1
    assert any("ZeroDivisionError: a bug" in line.get("traceback", "") for line in await process.log())


async def test_a_task_that_fails_ends_the_process(start: Start, witness: Fleet) -> None:
    process = await start("crash")
    assert (await process.until_state("failed"))["exit"] == 1
    assert await process.ended() == 1
    assert any("a bug in a task" in line.get("traceback", "") for line in await process.log())
    await until(lambda: not witness.alive())


async def test_a_process_that_stood_still_comes_back_as_another(start: Start, witness: Fleet) -> None:
    process = await start()
    other = await start(SS_NAME="other")
    await process.until_state("ready")
    await other.until_state("ready")
    await until(lambda: len(witness.workers("decode")) == 2)
    before = {lease.name: lease.instance for lease in witness.workers("decode")}
    process.send(signal.SIGSTOP)
    await until(lambda: not witness.is_alive(before["probe"]))
    process.send(signal.SIGCONT)
    await until(lambda: len(witness.workers("decode")) == 2)
    after = {lease.name: lease.instance for lease in witness.workers("decode")}
    assert after["other"] == before["other"]
    assert after["probe"] != before["probe"]
    assert not witness.is_alive(before["probe"])


async def test_a_restart_of_nats_changes_nobody(start: Start, own_nats_server: NatsServer, namespace: str) -> None:
    process = await start(SS_NATS_URL=own_nats_server.url)
    await process.until_state("ready")
    bus = await connect_to(own_nats_server.url, namespace)
    fleet = Fleet(bus, Subjects(namespace), NullTelemetry())
    ends: list[str] = []
    fleet.on_change(lambda lease, is_alive: is_alive or ends.append(lease.instance))
    await fleet.open()
    (lease,) = fleet.workers("decode")
    own_nats_server.restart(wipe=True)
    await until(lambda: bus.is_connected and (now := fleet.get(lease.instance)) and now.sequence > lease.sequence + 2)
    assert ends == []
    await fleet.close()
    await bus.close()


async def test_a_connection_that_is_closed_for_good_ends_the_process_with_70(start: Start, nats_server: NatsServer) -> None:
    async with Proxy(nats_server.port) as proxy:
        process = await start(SS_NATS_URL=proxy.url)
        await process.until_state("ready")
        proxy.inject(b"-ERR 'Maximum Payload Violation'\r\n")
        assert (await process.until_state("failed"))["code"] == "bus_closed"
        assert await process.ended() == 70


async def test_it_drains_when_its_parent_dies(nats_server: NatsServer, namespace: str, witness: Fleet) -> None:
    environ = {"SS_NATS_URL": nats_server.url, "SS_NAMESPACE": namespace, "SS_PARENT_DEATH": "1"}
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-m', '{PROBE}'])"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", command, cwd=ROOT, env=environ, stderr=asyncio.subprocess.DEVNULL)
    try:
        await until(lambda: witness.workers("decode"))
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not witness.alive())


def test_a_service_imports_neither_torch_nor_a_collectors_client() -> None:
    code = "import sys, services.planner.service; assert not {'torch', 'opentelemetry', 'requests', 'faiss'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
