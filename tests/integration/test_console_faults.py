"""A machine that is not as it must be: `up` or the service concerned says so in a line, and `doctor` finds it and says what to do."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.local_stack import LocalStack
from services.console.__main__ import main
from tests.support.nats import WITHOUT_JETSTREAM, NatsServer, connect_to
from tests.support.stack import SIM, checked_stack, clean

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = (sys.executable, "-P", "-m", "services.console")
OBEDIENT = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all") if os.getuid() == 0 else ()
"""Root, but as little as others may it read and write what is somebody else's."""


def console(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = (*OBEDIENT, *CONSOLE, *words)
    done = subprocess.run(command, env={**os.environ, **clean(None), **environ}, capture_output=True, text=True, timeout=90, check=False)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


def findings(state_dir: Path, part: str, **environ: str) -> list[dict[str, Any]]:
    told = console("doctor", part, "--json", "--state-dir", str(state_dir), **environ).stdout
    found: list[dict[str, Any]] = json.loads(told)[part]
    return found


def until_found(state_dir: Path, text: str) -> dict[str, Any]:
    """The finding about the stack that contains `text`, once it is there."""
    while True:
        for one in findings(state_dir, "stack"):
            if text in one["text"]:
                return one


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("faults"), *SIM) as stack:
        yield stack


# -- secrets ------------------------------------------------------------------------------------------------------------
def test_a_password_that_is_gone(stack: LocalStack) -> None:
    password = stack.folder / "nats" / "router"
    kept = password.read_text()
    password.unlink()
    assert "slipstream down" in until_found(stack.state_dir, "NATS passwords are gone")["remedy"], "before anything has died"
    old = stack.kill("router")
    try:
        died = until_found(stack.state_dir, f"router has died and is not back yet: SS_NATS_PASSWORD_FILE='{password}'")
        assert died["state"] == "failed" and "slipstream logs router" in died["remedy"]
    finally:
        password.write_text(kept)
        stack.wait_restarted("router", old)
    while main(["status", "--state-dir", str(stack.state_dir)]) != 0:
        pass


# -- ports --------------------------------------------------------------------------------------------------------------
def test_a_port_that_is_taken_before_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        up = console("up", *SIM, "--port", str(port), "--state-dir", str(tmp_path))
        assert up.returncode == 3
        assert f"✘ gateway    127.0.0.1:{port} is in use by pid {os.getpid()}" in up.stdout and f"--port {port + 1}" in up.stdout
    failed = until_found(tmp_path, "the last start failed")
    assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in failed["text"] and f"--port {port + 1}" in failed["remedy"]


def test_a_port_that_is_taken_while_the_gateway_is_away(stack: LocalStack) -> None:
    port = int(stack.url.rpartition(":")[2])
    old = stack.kill("gateway")
    with _taken(port):
        died = until_found(stack.state_dir, f"gateway has died and is not back yet: 127.0.0.1:{port}")
        assert died["state"] == "failed" and died["remedy"]
    stack.wait_restarted("gateway", old)
    while main(["status", "--state-dir", str(stack.state_dir)]) != 0:
        pass


def _taken(port: int) -> socket.socket:
    """The port, as soon as its holder is gone."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            time.sleep(0.005)


# -- folders ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A folder that we may not enter; on tmpfs, where arenas lie."""
    folder = Path("/dev/shm") / f"slipstream-test-{os.getpid()}"
    folder.mkdir(mode=0o000)
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    yield folder
    folder.rmdir()


def test_a_place_of_the_arena_that_is_somebody_elses(tmp_path: Path, foreign: Path) -> None:
    up = console("up", *SIM, "--port", "0", "--state-dir", str(tmp_path), SS_KV_DIR=str(foreign))
    assert up.returncode == 3
    assert f"✘ kvstore    {foreign} cannot be written: it belongs to uid" in up.stdout and "SS_KV_DIR" in up.stdout
    assert any(f"{foreign} cannot be written" in one["text"] for one in findings(tmp_path, "stack"))
    [place] = [one for one in findings(tmp_path, "environment", SS_KV_DIR=str(foreign)) if str(foreign) in one["text"]]
    assert place["state"] == "failed" and place["remedy"]


def test_a_state_folder_that_is_somebody_elses(foreign: Path) -> None:
    up = console("up", *SIM, "--port", "0", "--nats-port", "0", "--state-dir", str(foreign))
    assert up.returncode == 3 and f"state folder {foreign}: Permission denied" in up.stdout and "--state-dir" in up.stdout
    [place] = [one for one in findings(foreign, "environment") if one["text"].startswith("runs and logs")]
    assert place["state"] == "failed" and "belongs to uid" in place["text"] and place["remedy"]


# -- NATS' data of an older version -------------------------------------------------------------------------------------
async def test_streams_of_an_older_version_in_a_nats_that_exists(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "old")
    server.start()
    bus = await connect_to(server.url)
    config = {"name": "SS_DECODE", "subjects": ["ss.v1.decode.*"], "storage": "file", "retention": "limits", "num_replicas": 1}
    await bus.request("$JS.API.STREAM.CREATE.SS_DECODE", json.dumps(config).encode(), timeout_s=5)
    await bus.close()
    words = ("up", *SIM, "--port", "0", "--state-dir", str(tmp_path), "--nats-url", server.url)
    up = await asyncio.to_thread(console, *words)
    assert up.returncode == 3
    assert "✘ nats       JetStream refuses SS_DECODE" in up.stdout and "nats stream rm" in up.stdout
    failed = await asyncio.to_thread(until_found, tmp_path, "the last start failed")
    assert "SS_DECODE" in failed["text"] and "nats stream rm" in failed["remedy"]
    server.close()


async def test_a_login_in_the_address_of_nats_is_not_shown(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "plain", WITHOUT_JETSTREAM)
    server.start()
    url = server.url.replace("//", "//bob:hunter2@")
    up = await asyncio.to_thread(console, "up", *SIM, "--port", "0", "--state-dir", str(tmp_path), "--nats-url", url)
    assert up.returncode == 3 and "without JetStream" in up.stdout
    told = up.stdout + up.stderr + str(await asyncio.to_thread(findings, tmp_path, "stack"))
    assert "hunter2" not in told and "bob" not in told
    server.close()


# -- clocks -------------------------------------------------------------------------------------------------------------
def test_a_machine_whose_clock_is_ahead(stack: LocalStack, tmp_path: Path) -> None:
    """A prefill worker joins from a machine that is 40 s ahead: `up` there says so, the worker does once it is asked, and doctor here."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler makes the clock: apt-get install gcc"
    library = tmp_path / "skewed_clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(ROOT / "tests/support/skewed_clock.c")], check=True)
    ahead = LocalStack(stack.state_dir, "--only", "prefill", "--device", "sim", environ={"LD_PRELOAD": str(library), "SKEW_S": "40"})
    try:
        ahead.wait_ready()
        assert "the clock of NATS is 40 s behind this machine's" in ahead.output and "chronyc" in ahead.output
        [name] = [name for name in ahead.describe()["services"] if name.startswith("prefill")]
        found = until_found(stack.state_dir, f"the clock of {name} is")
        assert found["text"].endswith("s ahead of this machine's") and "chronyc" in found["remedy"]
        log = (ahead.folder / f"{name}.log").read_text()
        assert "this machine's clock is 40 s ahead of that of 127.0.0.1" in log
    finally:
        ahead.process.send_signal(signal.SIGTERM)
        ahead.stop()
