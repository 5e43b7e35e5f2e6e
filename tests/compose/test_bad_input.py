"""What is not as it must be: the service concerned says so in a line, and doctor finds it and says what to do."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.compose import ROOT, Compose, OtherCompose, ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


@pytest.fixture
def other(compose: Compose) -> Iterator[OtherCompose]:
    with contextlib.closing(OtherCompose(compose)) as other:
        yield other


def found(compose: Compose, text: str, part: str = "stack") -> dict[str, str]:
    """The one finding of doctor that contains `text`."""
    findings = compose.findings(part)
    fit = [one for one in findings if text in one["text"]]
    assert len(fit) == 1, findings
    assert fit[0]["remedy"]
    return fit[0]


# -- secrets ------------------------------------------------------------------------------------------------------------
def test_a_secret_that_is_gone_is_one_line_and_its_service_is_missed(other: OtherCompose) -> None:
    other.run("up", "-d", "--no-build", "--wait", "nats")
    (other.volume("secret-router") / "password").unlink()
    done = other.run("run", "--rm", "--no-deps", "router", check=False)
    told = done.stdout + done.stderr
    assert done.returncode in (2, 3) and "/secrets/router/password" in told and "Traceback" not in told
    assert found(other, "no router is ready")["remedy"] == "slipstream logs router", "as text: docker compose logs router"
    assert "docker compose logs router" in other.console("doctor", "stack", check=False)


def test_the_consoles_own_secret(other: OtherCompose) -> None:
    other.run("up", "-d", "--no-build", "--wait", "nats")
    (other.volume("secret-console") / "password").unlink()
    finding = found(other, "/secrets/console/password")
    assert finding["state"] == "failed" and "docker compose logs setup" in finding["remedy"]


def test_a_secret_of_somebody_else_stops_the_start_with_its_path(other: OtherCompose) -> None:
    other.run("up", "-d", "--no-build", "--wait", "nats")
    other.run("down")
    folder = other.volume("secret-router")
    for path in (folder, folder / "password"):
        shutil.chown(path, 0, 0)
    assert other.run("up", "-d", "--no-build", "--wait", "nats", check=False).returncode != 0
    logs = other.run("logs", "--no-color", "setup").stdout
    assert "/secrets/router/password: Permission denied; it must belong to uid 10001" in logs and "Traceback" not in logs
    assert "docker compose logs setup nats" in found(other, "the stack cannot be asked")["remedy"]


def test_a_key_file_that_the_gateway_may_not_read(other: OtherCompose, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.touch(0o600)
    override = tmp_path / "keys.yml"
    override.write_text(
        f"services: {{ gateway: {{ environment: {{ SS_OPEN: '0', SS_KEYS_FILE: /keys }}, volumes: ['{keys}:/keys:ro'] }} }}"
    )
    other.run("up", "-d", "--no-build", "--wait", "nats")
    done = other.run("-f", "docker-compose.yml", "-f", str(override), "run", "--rm", "--no-deps", "gateway", check=False)
    told = done.stdout + done.stderr
    assert done.returncode in (2, 3) and "/keys" in told and "Traceback" not in told


# -- ports --------------------------------------------------------------------------------------------------------------
def test_a_port_that_is_taken_is_named(compose: Compose, other: OtherCompose) -> None:
    done = other.run("up", "-d", "--no-build", check=False, SS_HTTP_PORT=str(compose.http_port))
    assert done.returncode != 0
    assert f"127.0.0.1:{compose.http_port}" in done.stderr
    other.run("up", "-d", "--no-build", "--wait", "nats")
    assert found(other, "no gateway is ready")["state"] == "failed"


def test_the_port_of_nats_that_is_taken_is_named(compose: Compose, other: OtherCompose) -> None:
    done = other.run("up", "-d", "--no-build", check=False, SS_NATS_PORT=str(compose.nats_port))
    assert done.returncode != 0
    assert f"127.0.0.1:{compose.nats_port}" in done.stderr
    assert "docker compose ps -a" in found(other, "the stack cannot be asked")["remedy"]


# -- volumes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("options", "why"), [("size=16m,uid=10001,mode=0700", "512 MiB"), ("size=600m,uid=0,mode=0700", "/kv")])
def test_an_arena_that_cannot_be_made_costs_the_tier_and_not_the_service(
    other: OtherCompose, tmp_path: Path, options: str, why: str
) -> None:
    """Too small, or somebody else's."""
    override = tmp_path / "arena.yml"
    override.write_text(f"volumes: {{ arena: {{ driver_opts: {{ type: tmpfs, device: tmpfs, o: '{options}' }} }} }}")
    other.run("-f", "docker-compose.yml", "-f", str(override), "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
    logs = other.run("logs", "--no-color", "kvstore").stdout
    [line] = [line for line in logs.splitlines() if "no KV store on this host" in line]
    assert why in line and "Traceback" not in logs
    assert other.counted(other.containers("kvstore")[0], "slipstream_kv_tier_refused_total") == 1
    answer = asyncio.run(ask(other, 4))
    assert answer.is_ok, answer.error
    assert found(other, "a tier of the KV store was left out")["state"] == "warning"


def test_a_trace_volume_of_somebody_else_costs_the_traces_and_not_the_service(other: OtherCompose, tmp_path: Path) -> None:
    override = tmp_path / "traces.yml"
    override.write_text("volumes: { traces: { driver_opts: { type: tmpfs, device: tmpfs, o: 'size=16m,uid=0,mode=0700' } } }")
    files = ("-f", "docker-compose.yml", "-f", str(override))
    other.run(*files, "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
    assert "traces cannot be written to /traces" in other.run("logs", "--no-color", "gateway").stdout
    assert asyncio.run(ask(other, 4)).is_ok
    gateway = other.containers("gateway")[0]
    while not other.counted(gateway, 'slipstream_telemetry_dropped_total{reason="trace_file"}'):
        pass
    assert found(other, "spans could not be written")["state"] == "warning"


def test_nats_data_of_somebody_else_stop_the_start_with_both_uids(other: OtherCompose) -> None:
    other.run("up", "-d", "--no-build", "--wait", "nats")
    other.run("down")
    shutil.chown(other.volume("nats-data"), 0, 0)  # which the engine lets stand, as something lies in it
    assert other.run("up", "-d", "--no-build", "--wait", "nats", check=False).returncode != 0
    logs = other.run("logs", "--no-color", "setup").stdout
    assert "/data belongs to uid 0, and it runs as uid 10001" in logs and "Traceback" not in logs
    assert found(other, "/data belongs to uid 0")["state"] == "failed"


# -- NATS' data ---------------------------------------------------------------------------------------------------------
OLDER = """
import asyncio, json, nats
async def main():
    password = open("/secrets/console/password").read().strip()
    connection = await nats.connect("nats://nats:4222", user="console", password=password, inbox_prefix=b"_INBOX_console")
    config = {"name": "SS_DECODE", "subjects": ["ss.v1.decode.*"], "storage": "file", "retention": "limits", "num_replicas": 1}
    answer = await connection.request("$JS.API.STREAM.CREATE.SS_DECODE", json.dumps(config).encode(), timeout=5)
    assert "error" not in json.loads(answer.data), answer.data
    await connection.close()
asyncio.run(main())
"""


def test_nats_data_of_an_older_version(other: OtherCompose) -> None:
    """While it runs, the router says which stream; at the next start nothing is started before it is mended."""
    other.run("up", "-d", "--no-build", "--wait", "nats")
    other.run("run", "--rm", "-T", "--entrypoint", "python", "console", "-c", OLDER)
    done = other.run("run", "--rm", "--no-deps", "router", check=False)
    assert done.returncode != 0 and "JetStream refuses SS_DECODE" in done.stdout + done.stderr
    assert "docker volume rm" in found(other, "SS_DECODE is of another version")["remedy"]
    other.run("down")
    assert other.run("up", "-d", "--no-build", "--wait", "nats", check=False).returncode != 0
    assert "SS_DECODE is of another version" in other.run("logs", "--no-color", "setup").stdout
    assert found(other, "SS_DECODE is of another version")["state"] == "failed"


def test_garbage_in_natss_data_is_told_and_the_stack_answers(other: OtherCompose) -> None:
    other.run("up", "-d", "--no-build", "--wait", "kvstore")  # which makes the streams
    other.run("down")
    streams = other.volume("nats-data") / "jetstream" / "APP" / "streams"
    (streams / "SS_USAGE" / "meta.inf").write_text("garbage")
    (streams / "SS_DEAD" / "msgs" / "1.blk").write_bytes(b"\x00\xff" * 200)
    (streams / "nonsense").mkdir()
    shutil.chown(streams / "nonsense", 10001, 10001)
    other.run("up", "-d", "--no-build", "--wait", "--scale", "decode=1")
    assert asyncio.run(ask(other, 4)).is_ok
    assert found(other, "stream SS_USAGE were damaged")["state"] == "warning"
    assert [one["text"] for one in other.findings("stack") if one["state"] == "failed"] == []


# -- clocks -------------------------------------------------------------------------------------------------------------
def test_a_worker_whose_clock_is_ahead_loses_no_request_and_says_so(other: OtherCompose, tmp_path: Path) -> None:
    library, override = tmp_path / "skewed_clock.so", tmp_path / "clock.yml"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, ROOT / "tests/support/skewed_clock.c"], check=True)
    command = "[env, LD_PRELOAD=/skewed_clock.so, SKEW_S=40, slipstream-service, decode]"
    override.write_text(f"services: {{ decode: {{ command: {command}, volumes: ['{library}:/skewed_clock.so:ro'] }} }}")
    files = ("-f", "docker-compose.yml", "-f", str(override))
    other.run(*files, "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
    answer = asyncio.run(ask(other, 4))
    assert answer.is_ok, answer.error
    finding = found(other, "the clock of decode-")
    assert finding["text"].endswith("s ahead of this machine's") and "chronyc" in finding["remedy"]
    assert "this machine's clock is 40 s ahead of that of" in other.run("logs", "--no-color", "decode").stdout  # as it was asked


# -- a collector that hangs ---------------------------------------------------------------------------------------------
HANGING = """
services:
  hole:
    image: slipstream-core
    profiles: [cpu]
    networks: [bus]
    command: [python, -c, "import socket; server = socket.create_server(('', 4318)); kept = [server.accept() for _ in iter(int, 1)]"]
"""


def test_a_collector_that_hangs_costs_spans_and_doctor_says_so(other: OtherCompose, tmp_path: Path) -> None:
    override = tmp_path / "hanging.yml"
    override.write_text(HANGING)
    other.environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://hole:4318"}
    files = ("-f", "docker-compose.yml", "-f", str(override))
    other.run(*files, "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
    assert asyncio.run(ask(other, 4)).is_ok
    gateway = other.containers("gateway")[0]
    while not other.counted(gateway, 'slipstream_telemetry_dropped_total{reason="collector"}'):
        pass
    assert "spans dropped on their way to the collector" in other.run("logs", "--no-color", "gateway").stdout
    assert found(other, "spans did not reach the collector")["state"] == "warning"
    assert "does not answer" in found(other, "the collector at http://hole:4318", "environment")["text"]
    assert asyncio.run(ask(other, 4)).is_ok
