"""`slipstream up` as a person meets it: what stops it from starting, and a start, a fault and an end that go well."""

import importlib.metadata
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loadtest.local_stack import LocalStack
from services.console.__main__ import main
from services.console.broker import find_server
from services.console.preflight import free_port
from shared.engine.model.loader import KNOWN_MODELS
from tests.support.stack import SIM, checked_stack, clean, status_of

pytestmark = pytest.mark.timeout(120)


def up(state_dir: Path, *flags: str, prepare: Callable[[], None] | None = None, **environ: str) -> tuple[int, str]:
    """Run `up` to its end; exit code and all that it printed."""
    command = [sys.executable, "-P", "-m", "services.console", "up", "--state-dir", str(state_dir), *flags]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **clean(environ)},
        preexec_fn=prepare,
    ) as process:
        shown, _ = process.communicate(timeout=100)
    assert "Traceback" not in shown
    assert not Path(f"/dev/shm/slipstream-{os.getuid()}-{process.pid}").exists()
    return process.returncode, shown


@pytest.fixture(scope="module")
def bundled_gguf() -> Path:
    """The GGUF file of the bundled model."""
    bundle = KNOWN_MODELS["smollm2-135m"]
    files = importlib.metadata.distribution(bundle.distribution).files
    assert files
    return Path(next(str(file.locate()) for file in files if file.name == bundle.file))


@pytest.fixture
def nats_without_jetstream(tmp_path: Path) -> Iterator[str]:
    port = free_port("127.0.0.1")
    command = [find_server(), "--addr", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        while "Server is ready" not in server.stderr.readline():
            assert server.poll() is None
        yield f"nats://127.0.0.1:{port}"
        server.terminate()


def test_a_taken_http_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, shown = up(tmp_path, *SIM, "--port", str(port), "--nats-port", "0")
    assert code == 3
    assert f"127.0.0.1:{port} is in use by pid {os.getpid()}" in shown
    assert f"slipstream up --port {port + 1}" in shown


def test_a_taken_nats_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-port", str(port))
    assert code == 3
    assert f"127.0.0.1:{port} is in use by pid" in shown
    assert f"--nats-port {port + 1}" in shown


def test_an_existing_nats_without_jetstream(tmp_path: Path, nats_without_jetstream: str) -> None:
    code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-url", nats_without_jetstream)
    assert code == 3
    assert "without JetStream" in shown
    assert "nats-server -js" in shown


def test_an_existing_nats_that_is_not_there(tmp_path: Path) -> None:
    code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-url", f"nats://127.0.0.1:{free_port('127.0.0.1')}")
    assert code == 3
    assert "cannot be reached" in shown


def test_what_stops_a_start_is_told_before_a_model_is_looked_for(tmp_path: Path) -> None:
    """NATS, a folder that is missing, a policy: cheap to see, and fetching a model can take minutes."""
    missing = ("--model", "./nope.gguf")
    nobody = f"nats://127.0.0.1:{free_port('127.0.0.1')}"
    for flags, environ, code, cause in (
        (("--nats-url", nobody), {}, 3, "cannot be reached"),
        (("--nats-url", "nats://127.0.0.1:99999"), {}, 2, "not an address"),
        (("--kv-ssd", f"{tmp_path}/no/such:1G"), {}, 2, "there is no folder"),
        ((), {"SS_KV_POLICY": "nonsense"}, 2, "no such policy"),
    ):
        ended, shown = up(tmp_path / "state", *SIM, "--port", "0", "--nats-port", "0", *missing, *flags, **environ)
        assert (ended, cause in shown, "slipstream models" in shown) == (code, True, False), shown
    assert not (tmp_path / "no").exists()


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-port", "0", "--model", "./nope.gguf")
    assert code == 2
    assert "nope.gguf" in shown
    assert "no such file" in shown
    assert "slipstream models" in shown


def test_an_architecture_that_is_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"], "model_type": "mamba"}')
    code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-port", "0", "--model", str(folder))
    assert code == 3
    assert "mamba" in shown.lower()


@pytest.mark.parametrize("damage", ["truncated", "corrupt", "empty"])
def test_a_damaged_gguf(tmp_path: Path, damage: str, bundled_gguf: Path) -> None:
    content = bundled_gguf.read_bytes()[: 2**20]
    if damage == "corrupt":
        content = b"GGUF" + os.urandom(4096)
    elif damage == "empty":
        content = b""
    (tmp_path / "broken.gguf").write_bytes(content)
    code, shown = up(
        tmp_path, *SIM, "--port", "0", "--nats-port", "0", "--model", str(tmp_path / "broken.gguf"), SS_CACHE_DIR=str(tmp_path / "cache")
    )
    assert code == 3
    assert "broken.gguf" in shown
    assert not list((tmp_path / "cache").glob("models/*/*.safetensors"))


def test_no_room_for_the_converted_weights(tmp_path: Path, bundled_gguf: Path) -> None:
    def small_files_only() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 * 2**20, 8 * 2**20))

    code, shown = up(tmp_path, *SIM, "--port", "0", "--nats-port", "0", prepare=small_files_only, SS_CACHE_DIR=str(tmp_path / "cache"))
    assert code == 3
    assert "SS_CACHE_DIR" in shown


def test_too_little_room_on_tmpfs(tmp_path: Path) -> None:
    code, shown = up(tmp_path, "--device", "sim", "--kv-dram", "900T", "--port", "0", "--nats-port", "0")
    assert code == 3
    assert "asked for" in shown
    assert "--kv-dram" in shown


def test_joining_needs_something_to_join(tmp_path: Path) -> None:
    code, shown = up(tmp_path, "--only", "decode", "--device", "sim", "--run", "122532")
    assert code == 3
    assert "✘ join" in shown and "no stack is running" in shown
    assert " 1 decode" in shown and "prefill" not in shown, "only what was asked for is named"


def test_a_start_tells_its_phases_and_ends_with_what_to_type(tmp_path: Path) -> None:
    with checked_stack(tmp_path, *SIM, "--prefill", "2", "--hosts", "2") as stack:
        assert set(stack.describe()["services"]) == {
            *("nats", "kvstore-0", "kvstore-1", "prefill-0", "prefill-1", "decode-0", "router", "planner", "gateway")
        }
        lines = stack.output.rstrip().splitlines()
        assert lines[-1].strip() == f"Stop         Ctrl-C (drains), or: slipstream down --state-dir {tmp_path}"
        for name in ("model", "nats", "kvstore-1", "prefill-1", "decode-0", "router", "planner"):
            assert any(line.strip().startswith(f"✔ {name}") for line in lines), stack.output
        assert "self-test: 1 token in" in stack.output
        assert f"{stack.url}/v1" in stack.output


def test_a_dead_service_comes_back_under_its_name(tmp_path: Path) -> None:
    with checked_stack(tmp_path, *SIM) as stack:
        old = stack.kill("router")
        new = stack.wait_restarted("router", old)
        assert new != old
        assert "! router  exited (SIGKILL) · restarting in 0.5 s" in stack.output


def test_a_second_signal_kills(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path, *SIM)
    stack.wait_ready()
    pids = list(stack.describe()["services"].values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # nobody can drain
    stack.process.send_signal(signal.SIGINT)
    while "Draining" not in stack.output:
        assert stack.process.poll() is None
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(20) == 130
    shutil.rmtree(tmp_path)


def test_workers_join_a_running_stack_and_down_stops_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack = LocalStack(tmp_path, *SIM)
    stack.wait_ready()
    guest = LocalStack(tmp_path, "--only", "decode", "--device", "sim")
    guest.wait_ready()
    assert list(guest.describe()["services"]) == ["decode-1"]
    decode = {service["name"]: service for service in status_of(stack, capsys)["services"] if service["role"] == "decode"}
    assert decode["decode-0"]["host"] == decode["decode-1"]["host"], "the guest maps the arena of the stack"
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert (guest.process.wait(10), stack.process.wait(10)) == (0, 0)
    shown = capsys.readouterr().out
    assert shown.count("✔ stopped") == 2
    assert main(["down", "--state-dir", str(tmp_path)]) == 0
    assert "nothing is running" in capsys.readouterr().out


def test_a_warmed_stack_finds_what_it_was_warmed_with(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You answer in one word and think about it for a while before. " * 6}
    lines = [json.dumps({"messages": [system, {"role": "user", "content": f"question {number}"}]}) for number in range(6)]
    file = tmp_path / "warm.jsonl"
    file.write_text("\n".join([*lines, json.dumps({"prompt": "word " * 9000})]))
    with checked_stack(tmp_path / "state", *SIM, "--warm", str(file)) as stack:
        assert "6 prompts warmed" in stack.output and "1 refused, first line 7: " in stack.output
        assert stack.output.index("prompts warmed") < stack.output.index("Ready in")
        body = {"model": "smollm2-135m", "messages": [system, {"role": "user", "content": "a new one"}], "max_tokens": 1}
        request = urllib.request.Request(
            f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        usage = json.load(urllib.request.urlopen(request))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 32
