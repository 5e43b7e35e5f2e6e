"""Keeps the processes of a run alive: starts them together, restarts the dead, drains them in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from services.console.backoff import Backoff
from services.console.board import Board
from services.console.child import Child, ChildSpec, StatusLine
from shared.errors import SlipstreamError

DRAIN_ORDER: tuple[tuple[str, ...], ...] = (("gateway",), ("router", "planner"), ("prefill", "decode"), ("kvstore",), ("nats",))
"""Who stops taking first. Each stage ends before the next begins: a gateway's last streams need everything behind it."""

SILENCE_S = 120.0
"""A service that is starting and has said nothing for so long has failed."""


class ChildFault(SlipstreamError):
    """A service that could not start. The board shows the cause on its line; `remedy` and `exit_code` are the service's own."""

    code = "service_failed"

    def __init__(self, name: str, message: str, remedy: str, exit_code: int) -> None:
        super().__init__(f"{name}  {message}", remedy=remedy)
        self.name = name
        self.cause = message
        self.exit_code = exit_code  # type: ignore[misc]  # a class variable on the root, this one's own here


class Supervisor:
    """Children by name. `on_change` is called when a pid has changed, `on_death` when a child that should live has ended."""

    def __init__(
        self,
        board: Board,
        log_dir: Path,
        on_change: Callable[[], None],
        on_death: Callable[[ChildSpec], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children: dict[str, Child] = {}
        self._board = board
        self._log_dir = log_dir
        self._on_change = on_change
        self._on_death = on_death
        self._monotonic = monotonic
        self._stopping = asyncio.Event()
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._heard_s: dict[str, float] = {}

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items() if child.pid}

    @property
    def away(self) -> list[str]:
        """Those that have ended and wait to be started again."""
        return [name for name, child in self.children.items() if not child.pid]

    async def start(self, specs: Sequence[ChildSpec]) -> None:
        """Start all of `specs` together; returns when each is ready. The first that cannot start raises ChildFault."""
        ready = [asyncio.get_running_loop().create_future() for _ in specs]
        for spec, future in zip(specs, ready, strict=True):
            child = self.children[spec.name] = Child(spec, self._log_dir)
            self._board.begin(spec.name, "starting")
            self._heard_s[spec.name] = self._monotonic()
            self._keepers[spec.name] = asyncio.create_task(self._keep(child, future), name=f"keep-{spec.name}")
        waiting: set[asyncio.Future[None]] = set(ready)
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_EXCEPTION)
                for future in done:
                    future.result()
                self._check_silence(specs)
                self._board.tick()
        finally:
            for future in ready:
                future.cancel()

    async def drain(self, limit_s: float) -> None:
        """SIGTERM stage by stage; what is not gone within `limit_s` a stage is killed. Idempotent."""
        self._stopping.set()
        for roles in DRAIN_ORDER:
            await self._end([child for child in self.children.values() if child.spec.role in roles], limit_s)
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    def kill(self) -> None:
        """End everything now."""
        self._stopping.set()
        for child in self.children.values():
            child.send(signal.SIGKILL)

    async def _keep(self, child: Child, ready: asyncio.Future[None]) -> None:
        """Life after life of one child, until `drain`."""
        backoff = Backoff(self._monotonic)
        while not self._stopping.is_set():
            backoff.started()
            began_s = self._monotonic()
            code = await child.live(self._on_change, partial(self._hear, child, ready, began_s))
            self._on_change()
            if self._stopping.is_set():
                return
            if not ready.done():
                ready.set_exception(_fault(child, code))
                return
            self._on_death(child.spec)
            delay_s = backoff.next_delay_s()
            cause = child.failure.message if child.failure else ending(code)
            self._warn(child, f"{cause} · restarting in {delay_s:g} s (restart {backoff.num_restarts})")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    def _hear(self, child: Child, ready: asyncio.Future[None], began_s: float, status: StatusLine) -> None:
        name = child.spec.name
        self._heard_s[name] = self._monotonic()
        if status.state == "phase":
            self._board.progress(name, status.text, status.fraction)
        elif status.state == "ready":
            detail = " · ".join(part for part in (child.spec.detail, status.detail) if part)
            if ready.done():
                self._board.say("done", f"{name}  ready again after {self._monotonic() - began_s:.1f} s")
            else:
                self._board.done(name, detail)
                ready.set_result(None)

    def _check_silence(self, specs: Iterable[ChildSpec]) -> None:
        for spec in specs:
            child = self.children[spec.name]
            if not child.is_ready and self._monotonic() - self._heard_s[spec.name] > SILENCE_S:
                cause = f"said nothing for {SILENCE_S:g} s while: {self._board.text(spec.name)}"
                raise ChildFault(spec.name, cause, f"See its log: {child.log_path}", 1)

    def _warn(self, child: Child, text: str) -> None:
        self._board.say("warning", f"{child.spec.name}  {text}")

    async def _end(self, children: Sequence[Child], limit_s: float) -> None:
        for child in children:
            child.send(signal.SIGTERM)
        keepers = [self._keepers[child.spec.name] for child in children]
        if keepers:
            _, stuck = await asyncio.wait(keepers, timeout=limit_s)
            for child in children:
                if self._keepers[child.spec.name] in stuck:
                    self._warn(child, f"did not stop within {limit_s:g} s, killed")
                    child.send(signal.SIGKILL)


def ending(code: int) -> str:
    """`exited (SIGKILL)` or `exited (code 1)`."""
    return f"exited ({signal.Signals(-code).name if code < 0 else f'code {code}'})"


def _fault(child: Child, code: int) -> ChildFault:
    if child.failure:
        return ChildFault(child.spec.name, child.failure.message, child.failure.remedy, child.failure.exit)
    words = child.last_words()
    cause = f"{ending(code)} before it was ready" + (f": {words}" if words else "")
    return ChildFault(child.spec.name, cause, f"See its log: {child.log_path}", 1)
