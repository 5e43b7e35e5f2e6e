"""`slipstream up`: starts a stack, says when it is ready, keeps it alive, drains it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from services.console.announce import header, ready_block
from services.console.board import Board
from services.console.broker import check_broker, prepare_broker
from services.console.bus_findings import clock_findings
from services.console.bus_look import nats_clock_s
from services.console.child import ChildSpec
from services.console.fleet_view import taken_numbers, visit
from services.console.last_start import FailedStart, forget_failed_start, note_failed_start
from services.console.model_phase import fetch_model
from services.console.obituary import Obituaries
from services.console.options import UpOptions, parse_options
from services.console.place import check_arenas, choose_http_port, prepare_place
from services.console.run_folder import Run, state_dir, write_run
from services.console.selftest import self_test
from services.console.settings_check import check_settings
from services.console.supervisor import ChildFault, Supervisor
from services.console.terminal import Terminal, folded, home_text, without_login
from services.console.threads import in_daemon_thread
from services.console.topology import Place, service_specs
from services.console.warm import read_requests, warm_up
from shared.errors import SlipstreamError
from shared.types import Role

DRAIN_S = 30.0
"""Limit of a stage of the drain; above the services' own (SS_DRAIN_S), so that they end by themselves."""


def run(argv: Sequence[str]) -> int:
    """The command. Exit 0 after a drain, 130 when interrupted before it was ready or killed, else by what failed."""
    options = parse_options(argv)
    check_settings(options, os.environ)
    return asyncio.run(Up(options, Terminal()).run())


class Up:
    """One run, from the first check to the last process gone."""

    def __init__(self, options: UpOptions, terminal: Terminal) -> None:
        self._options = options
        self._terminal = terminal
        self._board = Board(terminal, time.monotonic)
        self._phase_name = "up"
        self._stop = asyncio.Event()
        self._was_killed = False
        self._run: Run | None = None
        self._supervisor: Supervisor | None = None
        self._obituaries: Obituaries | None = None

    async def run(self) -> int:
        """Start, serve, drain. A fault of the start is one line on the board, its remedy below it."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        for line in folded(header(self._options), self._terminal.columns, 2):
            self._terminal.say(line)
        self._terminal.say()
        code = 130
        try:
            if await self._unless_stopped(self._start()):
                code = 0
                await self._stop.wait()
        except SlipstreamError as error:
            code = error.exit_code
            self._fail(error)
        await self._leave()
        return 130 if self._was_killed else code

    async def _start(self) -> None:
        options = self._options
        root, http_port = state_dir(options.state_dir), 0
        if "gateway" in options.roles:
            with self._phase("gateway"):
                http_port = choose_http_port(options)
        if "kvstore" in options.roles:
            with self._phase("kvstore"):
                check_arenas(options, root)
        with self._phase("nats"):
            await check_broker(options)
        with self._phase("join" if options.is_joining else "up"):
            self._run, place = prepare_place(options, root, http_port)
        self._write_run()
        self._supervisor = Supervisor(self._board, place.folder, self._write_run, self._on_death)
        if options.num_workers:
            with self._phase("model"):
                await fetch_model(options, self._board)
        with self._phase("nats"):
            place, first_numbers = await self._start_broker(place)
        await self._supervisor.start(service_specs(options, place, os.environ, first_numbers))
        if self._run.http_url:
            with self._phase("gateway"):
                self._board.begin("gateway", "self-test")
                self._board.done("gateway", await in_daemon_thread(partial(self_test, self._run.http_url)))
            if options.warm:
                await self._warm(options.warm, self._run.http_url)
        self._board.close()
        flags = f" --state-dir {shlex.quote(str(options.state_dir))}" if options.state_dir else ""
        self._terminal.say("\n" + ready_block(self._run, self._board.elapsed_s, flags, options.keys))
        self._update(state="ready")
        forget_failed_start(root)

    async def _warm(self, file: Path, http_url: str) -> None:
        loop = asyncio.get_running_loop()

        def report(text: str, fraction: float) -> None:
            loop.call_soon_threadsafe(self._board.progress, "warm", text, fraction)

        with self._phase("warm"):
            self._board.begin("warm", "reading requests")
            self._board.done("warm", await in_daemon_thread(partial(warm_up, http_url, read_requests(file), report)))

    async def _start_broker(self, place: Place) -> tuple[Place, dict[Role, int]]:
        """nats-server is up (or the existing one was found fit), streams and buckets are there."""
        assert self._supervisor
        broker = await prepare_broker(self._options, place)
        if broker.spec:
            await self._supervisor.start([broker.spec])
        user, password_file = broker.users.get("console", ("", None))
        client, client_password_file = broker.users.get("client", ("", None))
        self._update(
            nats_url=broker.url,
            nats_user=user,
            nats_password_file=password_file,
            nats_client_user=client,
            nats_client_password_file=client_password_file,
            nats_creds=broker.creds,
        )
        assert self._run
        numbers = await taken_numbers(self._run, provision=not self._options.is_joining)
        if not broker.spec:
            self._board.done("nats", broker.detail)
            await self._check_clock(self._run)
        self._obituaries = Obituaries(self._run, broker.users)
        place = msgspec.structs.replace(place, nats_url=broker.url, nats_users=broker.users, nats_creds=broker.creds)
        return place, numbers

    async def _check_clock(self, run: Run) -> None:
        """A NATS that is there already may be another machine's, whose clock dates what comes from there."""
        async with visit(run) as (bus, subjects):
            offset_s = await nats_clock_s(bus, subjects)
        for finding in clock_findings({} if offset_s is None else {"NATS": offset_s}):
            self._board.say("warning", f"{finding.text}. {finding.remedy}")

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Faults inside are shown on the line of `name`."""
        self._phase_name = name
        yield
        self._phase_name = "up"

    async def _unless_stopped(self, start: Coroutine[Any, Any, None]) -> bool:
        """Run `start`. False if a signal came first, which cancels it."""
        starting, stopping = asyncio.create_task(start), asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return False
        starting.result()
        return True

    def _on_signal(self) -> None:
        """The first asks to drain, the next one kills."""
        if self._stop.is_set() and self._supervisor:
            self._was_killed = True
            self._supervisor.kill()
        self._stop.set()

    def _on_death(self, spec: ChildSpec) -> None:
        if self._obituaries and spec.role != "nats":
            self._obituaries.tell(spec.name, spec.role)

    def _fail(self, error: SlipstreamError) -> None:
        name, cause = (error.name, error.cause) if isinstance(error, ChildFault) else (self._phase_name, error.message)
        cause = without_login(cause)
        self._board.failed(name, cause)
        self._board.close()
        failed = FailedStart(at_s=time.time(), phase=name, message=cause, remedy=error.remedy)
        note_failed_start(state_dir(self._options.state_dir), failed)
        for line in error.remedy.splitlines():
            self._terminal.say(f"    {line}")
        if self._run:
            self._terminal.say(f"    Logs: {home_text(self._run.folder)}")

    async def _leave(self) -> None:
        """Drain what was started; nothing stays behind but the logs."""
        self._board.close()
        began_s = time.monotonic()
        if self._supervisor and self._supervisor.pids:
            was_asked = self._stop.is_set()
            if was_asked:
                self._terminal.say("\nDraining; Ctrl-C again kills")
            await self._supervisor.drain(DRAIN_S)
            if self._obituaries:
                await self._obituaries.close()
            if was_asked:
                self._terminal.say(f"Stopped in {time.monotonic() - began_s:.1f} s")
        if self._run:
            self._update(state="stopped", pid=0)
            if self._run.kv_dir:
                shutil.rmtree(self._run.kv_dir, ignore_errors=True)
            shutil.rmtree(self._run.password_dir, ignore_errors=True)

    def _update(self, **changes: Any) -> None:
        assert self._run
        self._run = msgspec.structs.replace(self._run, **changes)
        self._write_run()

    def _write_run(self) -> None:
        assert self._run
        if self._supervisor:
            self._run = msgspec.structs.replace(self._run, services=self._supervisor.pids, away=self._supervisor.away)
        write_run(self._run)
