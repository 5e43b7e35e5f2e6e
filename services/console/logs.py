"""`slipstream logs`: what the services wrote, merged by time."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from services.console.remedy import as_typed_here, logs_command
from services.console.run_folder import add_run_flags, find_run_or_last, state_dir
from services.console.terminal import Terminal
from services.console.usage import Parser, whole_number
from shared.errors import EnvironmentFault

LEVELS = ("debug", "info", "warning", "error", "critical")
_COLOURS = {"warning": "yellow", "error": "red", "critical": "red", "debug": "dim"}
_POLL_S = 0.3
_SERVER = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) \[(\w{3})\] (.*)")
_SERVER_LEVELS = {"TRC": "debug", "DBG": "debug", "INF": "info", "WRN": "warning", "ERR": "error", "FTL": "critical"}
_AS_MEANT = "Plaintext passwords detected"
"""nats-server warns of what is meant to be so: they lie in a 0600 file."""


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = Parser(prog="slipstream logs", description="What the services of the running (or last) stack wrote.")
    parser.add_argument("service", nargs="?", default="", help="a process (decode-0) or a role (decode); default: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what comes; Ctrl-C ends it")
    parser.add_argument(
        "-n", "--lines", type=whole_number(0, 10**9), default=100, metavar="N", help="the last N lines (default 100; 0: all)"
    )
    parser.add_argument("--level", choices=LEVELS, default="info", help="at least this (default info)")
    parser.add_argument("--json", action="store_true", help="the lines as they stand in the files")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    files = log_files(find_run_or_last(state_dir(options.state_dir), options.run).folder, options.service)
    terminal = Terminal()
    tails = [Tail(file) for file in files]
    wanted = LEVELS[LEVELS.index(options.level) :]
    lines = [line for line in _read(tails) if line["level"] in wanted]
    for line in lines[-options.lines :] if options.lines else lines:
        terminal.say(_shown(line, terminal, as_json=options.json))
    with contextlib.suppress(KeyboardInterrupt):  # how following is meant to end
        while options.follow:
            time.sleep(_POLL_S)
            for line in _read(tails):
                if line["level"] in wanted:
                    terminal.say(_shown(line, terminal, as_json=options.json))
    return 0


def log_files(folder: Path, service: str) -> list[Path]:
    """Those of one process, of all of a role, or all. EnvironmentFault that lists them if there is none, or says who has them."""
    if logs_command():
        raise EnvironmentFault("the logs are not in this container", remedy=as_typed_here(f"slipstream logs {service}".rstrip()))
    files = sorted(folder.glob("*.log"))
    fit = [file for file in files if service in ("", file.stem, file.stem.rpartition("-")[0])]
    if not fit:
        raise EnvironmentFault(
            f"no log of {service or 'anything'} in {folder}", remedy=f"There are: {', '.join(file.stem for file in files)}"
        )
    return fit


class Tail:
    """One file, read on from where it was left. What is no JSON (a library's words) takes the time of the line before."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""
        self._time = ""

    def read(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self._at:
                self._at, self._rest = 0, b""  # it was cut or made anew: what stands there is all new
            file.seek(self._at)
            data = self._rest + file.read()
            self._at = file.tell()
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            try:
                told: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.MsgspecError:
                told = _foreign(line.decode(errors="replace"))
            told.setdefault("service", self._path.stem)
            told.setdefault("level", "info")
            self._time = told.setdefault("time", self._time)
            yield told


def _foreign(text: str) -> dict[str, Any]:
    """A line that is not ours: nats-server's tell time (this machine's zone) and level in their own way, others' nothing."""
    found = _SERVER.fullmatch(text)
    if found is None:
        return {"level": "info", "message": text}
    began = datetime.strptime(found[1], "%Y/%m/%d %H:%M:%S.%f").astimezone(UTC)
    level = "info" if found[3].startswith(_AS_MEANT) else _SERVER_LEVELS.get(found[2], "info")
    return {"time": began.isoformat(timespec="milliseconds"), "level": level, "message": found[3]}


def _read(tails: Sequence[Tail]) -> list[dict[str, Any]]:
    return sorted((line for tail in tails for line in tail.read()), key=lambda line: str(line["time"]))


def _shown(line: dict[str, Any], terminal: Terminal, *, as_json: bool) -> str:
    if as_json:
        return msgspec.json.encode(line).decode()
    colour = _COLOURS.get(line["level"])
    text = f"{str(line['time'])[11:23]:<12}  {line['service']:<10}  {line['level']:<7}  {line.get('message', '')}"
    more = [f"{name}={line[name]}" for name in ("code", "remedy", "trace_id") if line.get(name)]
    text = terminal.paint(text, colour) if colour else text
    return "\n".join([text + ("  " + "  ".join(more) if more else ""), *str(line.get("traceback", "")).splitlines()])
