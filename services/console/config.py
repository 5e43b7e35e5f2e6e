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

from services.console.run_folder import add_run_flags, find_run, live_runs, state_dir
from services.console.terminal import MASK, Terminal, table, without_login
from services.console.usage import Parser
from shared.config import read_config, to_environ, variable_of
from shared.errors import ConfigError
from shared.types import Role

ROLES = typing.get_args(Role)
Environ = Mapping[str, str]

_SECRET = re.compile(r"_(PASSWORD|SECRET|TOKEN|API_KEY|HEADERS)$")


class Setting(NamedTuple):
    """`origin`: default; environment (of `up`, or of this command where nothing runs); flag (of `up`, or what it decided itself)."""

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
    environ, outer, source = environment_of(options.service, role, state_dir(options.state_dir), options.run)
    settings = [one for one in settings_of(role, environ, outer) if not options.changed or one.value != one.default]
    if options.json:
        sys.stdout.write(msgspec.json.encode([one._asdict() for one in settings]).decode() + "\n")
        return 0
    terminal = Terminal()
    terminal.say(f"{options.service}: {source}")
    rows = [("setting", "value", *(("origin", "default") if options.origin else ()))]
    rows += [(one.variable, one.value or "–", *((one.origin, one.default or "–") if options.origin else ())) for one in settings]
    for line in table(rows):
        terminal.say(line)
    return 0


def environment_of(service: str, role: str, root: Path, wanted: str = "") -> tuple[Environ, Environ, str]:
    """The variables of the running process of that name (or the first of that role) and of the `up` that made it, else ours; whose."""
    run = find_run(root, wanted) if wanted or live_runs(root) else None
    running = run.services if run else {}
    name = next((name for name in sorted(running) if name == service or name.rpartition("-")[0] == service), "")
    theirs = read_environ(running[name]) if name else {}
    if not run or not theirs:
        return os.environ, os.environ, f"as a {role} would start from this environment"
    return theirs, read_environ(run.pid), f"as {name} runs (pid {running[name]}) in {run.folder.name}"


def read_environ(pid: int) -> dict[str, str]:
    """What a process was started with; empty if it is gone, or another user's."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0") if entry)
    return {key: value for key, _, value in pairs}


def masked(variable: str, value: str) -> str:
    """`value` without what opens doors: a login inside a URL, and whatever is a secret by its name (that of a file is none)."""
    if value and _SECRET.search(variable):
        return MASK
    return without_login(value)


def settings_of(role: str, environ: Environ, outer: Environ) -> list[Setting]:
    """In the order of the service's own struct. Raises ConfigError for a value that does not fit."""
    config_type = config_type_of(role)
    required = {variable_of(name): "/required" for name in _required(config_type)}
    values = to_environ(read_config(config_type, required | dict(environ)))
    defaults = to_environ(read_config(config_type, required))
    settings = []
    for variable in _variables(config_type):
        origin = "default" if variable not in environ else "environment" if outer.get(variable) == environ[variable] else "flag"
        shown = "" if variable in required and variable not in environ else masked(variable, values.get(variable, ""))
        settings.append(Setting(variable, shown, "" if variable in required else defaults.get(variable, ""), origin))
    return settings


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
