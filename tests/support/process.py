"""A service in a process of its own, with a status pipe, as a supervisor starts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class ServiceProcess:
    """`python -m <module>` with exactly the given SS_* variables."""

    def __init__(self, process: asyncio.subprocess.Process, status: asyncio.StreamReader, pipe: asyncio.BaseTransport) -> None:
        self.process = process
        self.statuses: list[dict[str, Any]] = []
        self._status = status
        self._pipe = pipe

    @classmethod
    async def start(cls, module: str, environ: dict[str, str]) -> ServiceProcess:
        read_end, write_end = os.pipe()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SS_", "OTEL_"))}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-W", "error", "-m", module),
            cwd=ROOT,
            env={**inherited, **environ, "SS_STATUS_FD": str(write_end)},
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(write_end,),
        )
        os.close(write_end)
        status = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(status), pipe)
        return cls(process, status, transport)

    async def until_state(self, state: str) -> dict[str, Any]:
        """The next status line of this state."""
        while line := await self._status.readline():
            self.statuses.append(json.loads(line))
            if self.statuses[-1]["state"] == state:
                return self.statuses[-1]
        raise AssertionError(f"it ended without {state!r}: {self.statuses} {await self.log()}")

    async def log(self) -> list[dict[str, Any]]:
        """Its log lines, once it has ended."""
        assert self.process.stderr
        return [json.loads(line) for line in (await self.process.stderr.read()).splitlines()]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Its exit code."""
        return await self.process.wait()

    async def close(self) -> None:
        """End it, whatever it does."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self._pipe.close()
        assert self.process.stderr
        await self.process.stderr.read()
