"""`slipstream down`: stops the running stack, as Ctrl-C in its terminal would."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence

import msgspec

from services.console.run_folder import Run, add_run_flags, choose, guests_of, live_runs, process_start, state_dir
from services.console.terminal import Terminal
from services.console.usage import Parser
from shared.errors import EnvironmentFault

_LIMIT_S = 150.0


def run(argv: Sequence[str]) -> int:
    """The command. Exit 0 also when nothing was running; 3 if several stacks run and none is named."""
    parser = Parser(prog="slipstream down", description="Stop the running stack: drain, then end every process of it.")
    parser.add_argument("--now", action="store_true", help="do not drain: kill")
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    terminal = Terminal()
    runs = live_runs(state_dir(options.state_dir))
    if not runs:
        terminal.say('{"stopped":[]}' if options.json else "nothing is running")
        return 0
    host = choose(runs, options.run)
    # Those that joined leave before the one whose NATS they use.
    stopping = [*guests_of(host, runs), host]
    for stack in stopping:
        _stop(stack, options.now)
        if not options.json:
            terminal.say(f"{terminal.mark('done')} stopped {stack.folder.name} ({len(stack.services)} processes)")
    if options.json:
        terminal.say(msgspec.json.encode({"stopped": [stack.folder.name for stack in stopping]}).decode())
    return 0


def _stop(stack: Run, now: bool) -> None:
    """SIGTERM (twice with `now`, which the supervisor takes as a kill) and wait until it is gone."""
    _terminate(stack)
    deadline_s = time.monotonic() + _LIMIT_S
    while process_start(stack.pid) == stack.pid_start:
        if time.monotonic() > deadline_s:
            raise EnvironmentFault(f"pid {stack.pid} did not stop within {_LIMIT_S:g} s", remedy=f"kill -9 {stack.pid}")
        time.sleep(0.05)
        if now:
            _terminate(stack)


def _terminate(stack: Run) -> None:
    with contextlib.suppress(ProcessLookupError):
        if process_start(stack.pid) == stack.pid_start:
            os.kill(stack.pid, signal.SIGTERM)
