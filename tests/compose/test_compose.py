"""docker-compose.yml on a real engine: both doors, every container killed, scaling under load. Run by `make test-compose`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client, Outcome
from services.console.preflight import free_port

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20, "temperature": 0}
CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m"
READ_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
DROP_S = 4.0
"""A gateway's work is dropped within so long: its lease runs out after 3 s."""
LOOK_S = 2.0
"""What looking into containers may take on top."""


class Compose:
    """One project of its own on free ports. `docker` is what the machine has; DOCKER_HOST names another engine."""

    def __init__(self) -> None:
        self.http_port, self.nats_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.environ = os.environ | {
            "COMPOSE_PROJECT_NAME": f"slipstream-test-{os.getpid()}",
            "SS_HTTP_PORT": str(self.http_port),
            "SS_NATS_PORT": str(self.nats_port),
            "SS_WORKER_THREADS": "1",
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def run(self, *words: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        command = ["docker", "compose", *words]
        done = subprocess.run(command, cwd=ROOT, env=self.environ | environ, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0 or not check, f"{' '.join(words)}: {done.stderr[-2000:]}"
        return done

    def containers(self, service: str) -> list[str]:
        return self.run("ps", "-q", service).stdout.split()

    def inspect(self, container: str, what: str) -> str:
        command = ["docker", "inspect", "-f", what, container]
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True).stdout.strip()

    def counted(self, container: str, name: str) -> float:
        """Sum of the series of one metric of /metrics whose beginning is `name`, asked from inside (nothing else reaches that port)."""
        command = ["docker", "exec", container, "python", "-c", READ_METRICS]
        text = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True).stdout
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def running(self) -> list[str]:
        """The decode containers that have a request."""
        return [container for container in self.containers("decode") if self.counted(container, "slipstream_decode_running")]

    def main_pid(self, container: str) -> int:
        """The service itself, below the container's init."""
        init = self.inspect(container, "{{.State.Pid}}")
        children = Path(f"/proc/{init}/task/{init}/children").read_text().split()
        return int(children[0] if children else init)

    def kill_main_process(self, container: str) -> int:
        """`docker kill` would count as a wish, and the restart policy would not apply. Returns how often it was restarted before."""
        num_restarts = int(self.inspect(container, "{{.RestartCount}}"))
        os.kill(self.main_pid(container), signal.SIGKILL)
        return num_restarts

    async def until_running(self) -> str:
        """The decode container that has taken a request."""
        while not (found := await asyncio.to_thread(self.running)):
            pass
        return found[0]

    async def until_healthy(self, container: str, num_restarts: int) -> None:
        while (
            int(self.inspect(container, "{{.RestartCount}}")) < num_restarts
            or self.inspect(container, "{{.State.Health.Status}}") != "healthy"
        ):
            await asyncio.sleep(0.5)

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.run("run", "--rm", "--no-deps", "console", "status", "--json").stdout)
        return answer


@pytest.fixture(scope="module")
def compose() -> Iterator[Compose]:
    stack = Compose()
    try:
        stack.run("up", "-d", "--build", "--wait")
        yield stack
        logs = stack.run("logs", "--no-color").stdout
        assert "Traceback" not in logs, logs[logs.index("Traceback") - 500 :][:4000]
    finally:
        stack.run("down", "-v", "-t", "5", check=False)


async def ask(compose: Compose, max_tokens: int, subject: str = "rivers") -> Outcome:
    client = Client(compose.url)
    body = {"model": MODEL, "prompt": f"A long story about {subject}:", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    outcome = await client.generate("/v1/completions", body | {"ignore_eos": True, "stream_options": {"include_usage": True}})
    await client.close()
    return outcome


async def test_both_doors_answer(compose: Compose) -> None:
    client = Client(compose.url)
    outcome = await client.generate(CHAT, {"model": MODEL, **QUESTION})
    await client.close()
    assert "Paris" in outcome.text, outcome.error
    answer = compose.run("run", "--rm", "--no-deps", "console", "nats", "req", "ss.v1.generate", json.dumps({"model": MODEL, **QUESTION}))
    assert "Paris" in answer.stdout
    url = compose.run("run", "--rm", "--no-deps", "console", "nats", "url").stdout
    assert url.startswith("nats://client:") and url.strip().endswith(f"@127.0.0.1:{compose.nats_port}")


async def test_all_containers_of_the_host_share_one_arena(compose: Compose) -> None:
    """Asked often enough, both decode workers answer; whichever it is finds the prompt's blocks, computed or not."""
    client = Client(compose.url)
    body = {"model": MODEL, "prompt": "The tide comes in, the tide goes out. " * 20, "max_tokens": 4, "temperature": 0}
    outcomes = [await client.generate("/v1/completions", body) for _ in range(8)]
    burst = await asyncio.gather(*(client.generate("/v1/completions", body) for _ in range(8)))
    await client.close()
    assert all(outcome.is_ok for outcome in [*outcomes, *burst])
    assert len({outcome.headers["x-slipstream-decode"] for outcome in burst}) == 2
    assert all(outcome.usage["prompt_tokens_details"]["cached_tokens"] >= 128 for outcome in burst)


def test_containers_have_no_more_rights_than_they_need(compose: Compose) -> None:
    for service in ("nats", "gateway", "router", "planner", "kvstore", "prefill", "decode"):
        [container, *_] = compose.containers(service)
        assert compose.inspect(container, "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}}") == "10001:10001 true"
        assert compose.inspect(container, "{{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}}") == "[ALL] [no-new-privileges:true]"
        assert int(compose.inspect(container, "{{.HostConfig.Memory}}")) > 0
        ports = json.loads(compose.inspect(container, "{{json .HostConfig.PortBindings}}")) or {}
        assert all(binding["HostIp"] == "127.0.0.1" for bindings in ports.values() for binding in bindings), service


def test_no_compiler_ships_and_every_kernel_does(compose: Compose) -> None:
    sources = {source.stem for package in ("services", "shared") for source in (ROOT / package).rglob("*.c")}
    for image in ("slipstream-core", "slipstream-worker"):
        command = ["docker", "run", "--rm", "--network", "none", image, "sh", "-c", "command -v cc gcc clang; ls /cache/kernels"]
        files = subprocess.run(command, env=compose.environ, capture_output=True, text=True, check=True).stdout.split()
        assert {name.rsplit("-", 1)[0] for name in files} == sources, image


def test_images_are_small(compose: Compose) -> None:
    """Beside the base image and the model: the base of the day is not ours to bound."""
    sizes = subprocess.run([ROOT / "infra/docker/sizes.sh"], env=compose.environ, capture_output=True, text=True, check=True).stdout
    rest = {line.split()[0]: float(line.split()[-1]) for line in sizes.splitlines()[1:]}
    assert 50 < rest["slipstream-core"] < 270, sizes
    assert 300 < rest["slipstream-worker"] < 1370, sizes


@pytest.mark.parametrize("service", ["decode", "prefill", "router", "kvstore", "planner", "nats"])
async def test_a_killed_container_comes_back_and_the_request_in_flight_finishes(compose: Compose, service: str) -> None:
    expected = await ask(compose, 60)
    asking = asyncio.ensure_future(ask(compose, 60))
    decoding = await compose.until_running()
    container = decoding if service == "decode" else compose.containers(service)[0]
    num_restarts = compose.kill_main_process(container)
    assert not asking.done()
    outcome = await asking
    assert (outcome.error, outcome.text, outcome.usage["completion_tokens"]) == ("", expected.text, 60)
    await compose.until_healthy(container, num_restarts + 1)


async def test_with_the_gateway_gone_its_clients_see_it_and_workers_drop_the_work(compose: Compose) -> None:
    """1,500 tokens take more than half a minute; they are not computed to the end for nobody."""
    asking = asyncio.ensure_future(ask(compose, 1500, "mountains"))
    decoding = await compose.until_running()
    [gateway] = compose.containers("gateway")
    num_restarts = compose.kill_main_process(gateway)
    killed_s = time.monotonic()
    assert (await asking).error
    while await asyncio.to_thread(compose.counted, decoding, "slipstream_decode_running"):
        pass
    took_s = time.monotonic() - killed_s
    print(f"dropped {took_s:.1f} s after the gateway's death")
    assert took_s < DROP_S + LOOK_S
    assert compose.counted(decoding, 'slipstream_decode_ended_total{outcome="gateway_gone"}') == 1
    await compose.until_healthy(gateway, num_restarts + 1)
    assert (await ask(compose, 8)).is_ok


async def test_scaling_up_under_load_fails_no_request(compose: Compose) -> None:
    stop = asyncio.Event()
    outcomes: list[Outcome] = []

    async def load(number: int) -> None:
        while not stop.is_set():
            outcomes.append(await ask(compose, 16, f"subject {number} {len(outcomes)}"))

    loading = [asyncio.ensure_future(load(number)) for number in range(3)]
    try:
        await asyncio.to_thread(compose.run, "up", "-d", "--wait", "--no-recreate", "--scale", "decode=4")
        while (
            sum(
                service["role"] == "decode" and service["state"] == "ready"
                for service in (await asyncio.to_thread(compose.status))["services"]
            )
            < 4
        ):
            pass
    finally:
        stop.set()
        await asyncio.gather(*loading)
    assert len(outcomes) > 4
    assert [outcome.error for outcome in outcomes if not outcome.is_ok] == []


def test_the_commands_of_the_readme(compose: Compose) -> None:
    [block] = re.findall(r"<!-- run: compose -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shown = ""
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:2] == ["docker", "compose"]
        shown += compose.run(*words[2:]).stdout
    assert "Paris" in shown and "nats://client:" in shown and len(compose.containers("decode")) == 4


# -- what is not as it must be ------------------------------------------------------------------------------------------
def test_a_port_that_is_taken_is_named(compose: Compose) -> None:
    with contextlib.closing(OtherCompose(compose)) as other:
        done = other.run("up", "-d", "--no-build", check=False, SS_HTTP_PORT=str(compose.http_port))
        assert done.returncode != 0
        assert f"127.0.0.1:{compose.http_port}" in done.stderr


@pytest.mark.parametrize(("options", "why"), [("size=16m,uid=10001,mode=0700", "512 MiB"), ("size=600m,uid=0,mode=0700", "/kv")])
def test_an_arena_that_cannot_be_made_costs_the_tier_and_not_the_service(compose: Compose, tmp_path: Path, options: str, why: str) -> None:
    """Too small, or somebody else's."""
    override = tmp_path / "arena.yml"
    override.write_text(f"volumes: {{ arena: {{ driver_opts: {{ type: tmpfs, device: tmpfs, o: '{options}' }} }} }}")
    with contextlib.closing(OtherCompose(compose)) as other:
        other.run("-f", "docker-compose.yml", "-f", str(override), "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
        logs = other.run("logs", "--no-color", "kvstore").stdout
        [line] = [line for line in logs.splitlines() if "no KV store on this host" in line]
        assert why in line and "Traceback" not in logs
        assert other.counted(other.containers("kvstore")[0], "slipstream_kv_tier_refused_total") == 1
        answer = asyncio.run(ask(other, 4))
        assert answer.is_ok, answer.error


def test_secrets_that_are_gone_are_one_line_and_no_traceback(compose: Compose) -> None:
    with contextlib.closing(OtherCompose(compose)) as other:
        done = other.run("run", "--rm", "--no-deps", "-v", "/secrets/router", "router", check=False)
        assert done.returncode in (2, 3)
        assert "/secrets/router/password" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,obs"])
def test_every_profile_is_well_formed_and_what_it_mounts_is_there(compose: Compose, profiles: str) -> None:
    config = json.loads(compose.run("config", "--format", "json", COMPOSE_PROFILES=profiles).stdout)
    mounts = [mount for service in config["services"].values() for mount in service.get("volumes", [])]
    assert [mount["source"] for mount in mounts if mount["type"] == "bind" and not Path(mount["source"]).exists()] == []
    published = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    for name, service in config["services"].items():
        assert service.get("image", "").rpartition(":")[2] != "latest" and service["mem_limit"] and service["cpus"], name


class OtherCompose(Compose):
    """A second project that uses the images of the first."""

    def __init__(self, first: Compose) -> None:
        super().__init__()
        self.environ["COMPOSE_PROJECT_NAME"] = first.environ["COMPOSE_PROJECT_NAME"] + "-other"

    def close(self) -> None:
        self.run("down", "-v", "-t", "5", check=False)
