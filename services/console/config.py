"""`slipstream config`: every setting of a service, its value, and where it comes from."""

from __future__ import annotations

import importlib
import os
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.console.flags import VARIABLES, is_typed
from services.console.run_folder import add_run_flags, find_run, live_runs, state_dir
from services.console.terminal import MASK, Terminal, table, without_login
from services.console.usage import Parser
from shared.config import read_config, to_environ, variable_of
from shared.errors import ConfigError
from shared.types import Role

ROLES = typing.get_args(Role)
Environ = Mapping[str, str]

_FLAGS = {variable: flag for flag, variable in VARIABLES.items()}
_SECRET = re.compile(r"_(PASSWORD|SECRET|TOKEN|API_KEY|HEADERS)$")


class Source(NamedTuple):
    """Where settings are read from: the environment of the process, and of the `up` that made it with its command line."""

    environ: Environ
    outer: Environ
    argv: Sequence[str]
    text: str
    """Which process that is, for people."""


class Setting(NamedTuple):
    """`origin`: default; environment (of `up`, or of this command where nothing runs); a flag of `up`; or up, which decided it."""

    variable: str
    value: str
    default: str
    origin: str


def run(argv: Sequence[str]) -> int:
    """The command. Exit 2 if a value does not fit."""
    parser = Parser(
        prog="slipstream config",
        description="Every setting of a service. Of the running process where there is one, else as it would start from this environment.",
    )
    parser.add_argument("service", help=f"a process (decode-0) or a role: {', '.join(ROLES)}")
    parser.add_argument("--origin", action="store_true", help="where each value comes from, and the default")
    parser.add_argument("--changed", action="store_true", help="only what is not the default")
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    role = options.service if options.service in ROLES else options.service.rpartition("-")[0]
    if role not in ROLES:
        raise ConfigError("service", options.service, "no such service", remedy=f"One of {', '.join(ROLES)}, or a process such as decode-0")
    source = source_of(options.service, role, state_dir(options.state_dir), options.run)
    settings = [one for one in settings_of(role, source) if not options.changed or one.value != one.default]
    if options.json:
        sys.stdout.write(msgspec.json.encode([one._asdict() for one in settings]).decode() + "\n")
        return 0
    terminal = Terminal()
    terminal.say(f"{options.service}: {source.text}")
    rows = [("setting", "value", *(("origin", "default") if options.origin else ()))]
    rows += [(one.variable, one.value or "–", *((one.origin, one.default or "–") if options.origin else ())) for one in settings]
    for line in table(rows):
        terminal.say(line)
    return 0


def source_of(service: str, role: str, root: Path, wanted: str = "") -> Source:
    """The running process of that name, or the first of that role; else what one would start from here."""
    run = find_run(root, wanted) if wanted or live_runs(root) else None
    running = run.services if run else {}
    name = next((name for name in sorted(running) if name == service or name.rpartition("-")[0] == service), "")
    theirs = read_environ(running[name]) if name else {}
    if not run or not theirs:
        return Source(os.environ, os.environ, (), f"as a {role} would start from this environment")
    return Source(theirs, read_environ(run.pid), _read_argv(run.pid), f"as {name} runs (pid {running[name]}) in {run.folder.name}")


def read_environ(pid: int) -> dict[str, str]:
    """What a process was started with; empty if it is gone, or another user's."""
    pairs = (entry.partition("=") for entry in _entries(pid, "environ") if entry)
    return {key: value for key, _, value in pairs}


def _read_argv(pid: int) -> tuple[str, ...]:
    return tuple(_entries(pid, "cmdline"))


def _entries(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def masked(variable: str, value: str) -> str:
    """`value` without what opens doors: a login inside a URL, and whatever is a secret by its name (that of a file is none)."""
    if value and _SECRET.search(variable):
        return MASK
    return without_login(value)


def settings_of(role: str, source: Source) -> list[Setting]:
    """In the order of the service's own struct. Raises ConfigError for a value that does not fit."""
    config_type = config_type_of(role)
    required = {variable_of(name): "/required" for name in _required(config_type)}
    values = to_environ(read_config(config_type, required | dict(source.environ)))
    defaults = to_environ(read_config(config_type, required))
    settings = []
    for variable in _variables(config_type):
        default = "" if variable in required else defaults.get(variable, "")
        value = values.get(variable, "") if variable not in required or variable in source.environ else ""
        settings.append(Setting(variable, masked(variable, value), default, _origin(variable, source, is_default=value == default)))
    return settings


def _origin(variable: str, source: Source, *, is_default: bool) -> str:
    flag = _FLAGS.get(variable, "")
    if variable not in source.environ:
        return "default"
    if flag and is_typed(flag, source.argv):
        return flag
    if source.outer.get(variable) == source.environ[variable]:
        return "environment"
    return "default" if is_default and variable not in source.outer else "up"


def config_type_of(role: str) -> type[msgspec.Struct]:
    """The struct that a service of `role` reads its settings into."""
    module = importlib.import_module(f"services.{role}.config")
    return next(one for name, one in vars(module).items() if name.lower() == f"{role}config" and isinstance(one, type))


def _required(config_type: type[Any]) -> list[str]:
    return [field.name for field in msgspec.structs.fields(config_type) if field.required]


def _variables(config_type: type[Any]) -> Iterator[str]:
    for field, hint in zip(msgspec.structs.fields(config_type), typing.get_type_hints(config_type).values(), strict=False):
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _variables(hint)
        else:
            yield variable_of(field.name)
