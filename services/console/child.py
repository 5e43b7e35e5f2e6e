"""One process under supervision: its start, what it reports, its end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

_PR_SET_PDEATHSIG = 1
_LINE_BYTES = 64 * 2**10
_libc = ctypes.CDLL(None)


class StatusLine(msgspec.Struct, frozen=True):
    """A line that a service writes to SS_STATUS_FD: a phase of its start, readiness, or why it cannot start."""

    state: Literal["phase", "ready", "failed"]
    text: str = ""
    fraction: float | None = None
    detail: str = ""
    code: str = ""
    message: str = ""
    remedy: str = ""
    exit: int = 1


_decode = msgspec.json.Decoder(StatusLine).decode


@dataclass(frozen=True)
class ChildSpec:
    """What is started. `probe`: for a program that reports nothing itself; returns its detail once it serves."""

    name: str
    role: str
    argv: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    probe: Callable[[], Awaitable[str]] | None = None
    detail: str = ""
    """Put before what it says of itself when ready."""


def _die_with_parent() -> None:
    """Between fork and exec: the kernel kills the child when the supervisor dies, however it dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """One life after another of the same spec. Output goes to `<log_dir>/<name>.log`."""

    def __init__(self, spec: ChildSpec, log_dir: Path) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.process: asyncio.subprocess.Process | None = None
        self.is_ready = False
        self.failure: StatusLine | None = None
        """Why this life could not start, in its own words."""

    @property
    def pid(self) -> int:
        """0 between two lives."""
        return self.process.pid if self.process and self.process.returncode is None else 0

    async def live(self, on_start: Callable[[], None], on_status: Callable[[StatusLine], None]) -> int:
        """Start it, hand over what it reports, return its exit code (negative: the signal that ended it)."""
        self.is_ready, self.failure = False, None
        read_end, write_end = os.pipe()
        try:
            with self.log_path.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *self.spec.argv,
                    env={**self.spec.environ, "SS_STATUS_FD": str(write_end)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(write_end,),
                    start_new_session=True,  # Ctrl-C reaches the supervisor alone, which drains in order
                    preexec_fn=_die_with_parent,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        on_start()
        listener = asyncio.create_task(self._probe(on_status) if self.spec.probe else self._listen(read_end, on_status))
        if self.spec.probe:
            os.close(read_end)
        try:
            return await self.process.wait()
        finally:
            if self.spec.probe:
                listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    def send(self, number: signal.Signals) -> None:
        """A signal, if it lives."""
        if self.process and self.process.returncode is None:
            self.process.send_signal(number)

    def last_words(self) -> str:
        """The last line of its log: a cause for a process that died without reporting one."""
        try:
            lines = self.log_path.read_bytes()[-4096:].decode(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "")

    def _hear(self, status: StatusLine, on_status: Callable[[StatusLine], None]) -> None:
        if status.state == "ready":
            self.is_ready = True
        elif status.state == "failed":
            self.failure = status
        on_status(status)

    async def _probe(self, on_status: Callable[[StatusLine], None]) -> None:
        assert self.spec.probe
        self._hear(StatusLine("ready", detail=await self.spec.probe()), on_status)

    async def _listen(self, read_end: int, on_status: Callable[[StatusLine], None]) -> None:
        """Read status lines until the child closes its end. A line that is none (a library's print) is left out."""
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while line := await reader.readline():
                try:
                    status = _decode(line)
                except msgspec.MsgspecError:
                    continue
                self._hear(status, on_status)
        finally:
            transport.close()
