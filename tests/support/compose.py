"""docker-compose.yml on a real engine, as a person starts it: a project of its own on free ports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

from loadtest.client import Client, Outcome
from services.console.preflight import free_port

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m"
QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 20, "temperature": 0}
READ_METRICS = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:9100/metrics').read().decode())"


class Compose:
    """One project of its own on free ports. `docker` is what the machine has; DOCKER_HOST names another engine."""

    def __init__(self) -> None:
        self.http_port, self.nats_port = free_port("127.0.0.1"), free_port("127.0.0.1")
        self.environ = os.environ | {
            "COMPOSE_PROJECT_NAME": f"slipstream-test-{os.getpid()}",
            "SS_HTTP_PORT": str(self.http_port),
            "SS_NATS_PORT": str(self.nats_port),
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

    def volume(self, name: str) -> Path:
        """Where the engine keeps a volume of this project, on this machine."""
        command = ["docker", "volume", "inspect", "-f", "{{.Mountpoint}}", f"{self.environ['COMPOSE_PROJECT_NAME']}_{name}"]
        return Path(subprocess.run(command, env=self.environ, capture_output=True, text=True, check=True).stdout.strip())

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

    def console(self, *words: str, check: bool = True) -> str:
        """What a command of the console says, in a container of its own."""
        done = self.run("run", "--rm", "console", *words, check=check)
        return done.stdout + (done.stderr if not check else "")

    def findings(self, part: str) -> list[dict[str, str]]:
        """What doctor finds, seen from a container."""
        told = self.run("run", "--rm", "console", "doctor", part, "--json", check=False).stdout
        found: list[dict[str, str]] = json.loads(told)[part]
        return found

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.console("status", "--json"))
        return answer


class OtherCompose(Compose):
    """A second project that uses the images of the first."""

    def __init__(self, first: Compose) -> None:
        super().__init__()
        self.environ["COMPOSE_PROJECT_NAME"] = first.environ["COMPOSE_PROJECT_NAME"] + "-other"

    def close(self) -> None:
        self.run("down", "-v", "-t", "5", "--remove-orphans", check=False)


async def ask(compose: Compose, max_tokens: int, subject: str = "rivers") -> Outcome:
    client = Client(compose.url)
    body = {"model": MODEL, "prompt": f"A long story about {subject}:", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    outcome = await client.generate("/v1/completions", body | {"ignore_eos": True, "stream_options": {"include_usage": True}})
    await client.close()
    return outcome
