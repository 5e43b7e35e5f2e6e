"""`slipstream down`: stops the running stack, as Ctrl-C in its terminal would."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from services.console.run_folder import Run, live_runs, process_start, state_dir
from services.console.terminal import Terminal
from shared.errors import EnvironmentFault

_LIMIT_S = 150.0


def run(argv: Sequence[str]) -> int:
    """The command. Exit 0 also when nothing was running."""
    parser = argparse.ArgumentParser(prog="slipstream down", description="Stop the running stack: drain, then end every process of it.")
    parser.add_argument("--now", action="store_true", help="do not drain: kill")
    parser.add_argument("--state-dir", type=Path, help="where `up` was told to keep its runs")
    options = parser.parse_args(argv)
    terminal = Terminal()
    root = state_dir(options.state_dir)
    runs = live_runs(root)
    if not runs:
        terminal.say("nothing is running")
        return 0
    # Those that joined leave before the one whose NATS they use.
    for stack in sorted(runs, key=lambda each: not each.joined):
        _stop(stack, options.now)
        terminal.say(f"{terminal.mark('done')} stopped {stack.folder.name} ({len(stack.services)} processes)")
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
