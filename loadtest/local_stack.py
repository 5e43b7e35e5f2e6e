"""`slipstream up` as a child process: any free ports, a state folder of its own, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

_START_S = 90.0
_STOP_S = 150.0
_POLL_S = 0.02


class StackFailed(RuntimeError):
    """The stack did not become ready, or did not stop. Carries what it printed."""


class LocalStack:
    """A stack of this machine. `describe()` is the run as it stands in its `run.json`."""

    def __init__(self, state_dir: Path, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        self.state_dir = state_dir
        state_dir.mkdir(parents=True, exist_ok=True)
        self._output = state_dir / f"up-{time.monotonic_ns()}.out"
        command = [sys.executable, "-P", "-m", "services.console", "up", "--state-dir", str(state_dir), *flags]
        if "--only" not in flags:
            command += [word for flag in ("--port", "--nats-port") if flag not in flags for word in (flag, "0")]
        with self._output.open("wb") as output:
            # A session of its own: a Ctrl-C meant for the caller must not stop the stack before the caller does.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self._output.read_text(errors="replace")

    @property
    def folder(self) -> Path:
        """The folder of the run: logs and traces."""
        return Path(self.describe()["folder"])

    @property
    def url(self) -> str:
        """The HTTP API, without /v1."""
        url: str = self.describe()["http_url"]
        return url

    def pid(self, name: str) -> int:
        """The process called `name`, as of now. KeyError between two lives."""
        pid: int = self.describe()["services"][name]
        return pid

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to the process called `name`; returns its pid."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def describe(self) -> dict[str, Any]:
        """`run.json` of this run. LookupError until it is written."""
        for file in self.state_dir.glob("run-*/run.json"):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                run: dict[str, Any] = msgspec.json.decode(file.read_bytes())
                if run["pid"] == self.process.pid:
                    return run
        raise LookupError("the run has not been written down yet")

    def wait_ready(self, limit_s: float = _START_S) -> None:
        """Until the stack says it is ready. StackFailed, with its output, if it ends or takes longer."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise StackFailed(f"up ended with exit code {self.process.returncode}:\n{self.output}")
            with contextlib.suppress(LookupError):
                if self.describe()["state"] == "ready":
                    return
            time.sleep(_POLL_S)
        output = self.output
        self.stop()
        raise StackFailed(f"not ready within {limit_s:g} s:\n{output}")

    def wait_restarted(self, name: str, old_pid: int, limit_s: float = 30.0) -> int:
        """Until `name` is another process than `old_pid` (it may still be starting); returns its pid."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            with contextlib.suppress(LookupError):
                if (pid := self.pid(name)) != old_pid:
                    return pid
            time.sleep(_POLL_S)
        raise StackFailed(f"{name} was not restarted within {limit_s:g} s:\n{self.output}")

    def stop(self) -> int:
        """SIGTERM, then wait until it has drained; returns the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise StackFailed(f"did not stop within {_STOP_S:g} s:\n{self.output}") from None


@contextlib.contextmanager
def local_stack(state_dir: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[LocalStack]:
    """A stack that is ready; stopped at the end."""
    stack = LocalStack(state_dir, *flags, environ=environ)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.stop()
