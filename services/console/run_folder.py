"""The folder of one run: logs, trace files, passwords, and `run.json`, by which the other commands find it."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from services.console.terminal import without_login
from shared.config import ServiceConfig, read_config
from shared.errors import EnvironmentFault

RUN_FILE = "run.json"
DEFAULT_STATE_DIR = "~/.local/state/slipstream"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What `up` writes down about itself. No secrets: passwords lie in 0600 files of the same folder."""

    folder: Path
    pid: int
    pid_start: int
    """The supervisor's start time in clock ticks: tells it from a later process with the same pid."""
    version: str
    namespace: str
    nats_url: str
    nats_user: str = ""
    nats_password_file: Path | None = None
    nats_creds: Path | None = None
    """How a command on this machine reaches the run's NATS: the console's own user, or the credentials `up` was given."""
    nats_client_user: str = ""
    nats_client_password_file: Path | None = None
    """The user for programs of one's own: it may ask, and hear its own answers."""
    nats_client_url: str = ""
    """Where they reach it, if not at `nats_url`."""
    http_url: str = ""
    """Empty: the run has no gateway."""
    kv_dir: Path | None = None
    """The folder on tmpfs with one folder a host."""
    num_hosts: int = 0
    cluster_secret_file: Path | None = None
    joined: bool = False
    """It joined the NATS of another run (`up --only`)."""
    state: str = "starting"
    services: dict[str, int] = {}
    """Name → pid, as of now."""
    away: list[str] = []
    """Those between two lives: they have ended and are not started again yet."""

    @property
    def is_elsewhere(self) -> bool:
        """Its processes, logs and passwords are not on this machine: a container that looks at the others."""
        return self.pid == 0 and not self.pid_start

    @property
    def title(self) -> str:
        """What people call it."""
        return without_login(self.nats_url) if self.is_elsewhere else self.folder.name

    def absent(self, ready: Container[str]) -> list[str]:
        """Its own processes that are not among `ready`."""
        return sorted(name for name in {*self.services, *self.away} - {"nats"} if name not in ready)

    @property
    def password_dir(self) -> Path:
        return self.folder / "nats"


def state_dir(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path:
    """`--state-dir`, else SS_STATE_DIR, else under XDG_STATE_HOME, else ~/.local/state/slipstream."""
    if given:
        return given.expanduser().absolute()
    if environ.get("SS_STATE_DIR"):
        return Path(environ["SS_STATE_DIR"]).expanduser().absolute()
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / "slipstream"
    return Path(DEFAULT_STATE_DIR).expanduser()


def create_run_folder(root: Path) -> Path:
    """A new 0700 folder `run-<date>-<time>`. Raises EnvironmentFault where it cannot be made."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        for suffix in ("", *(f"-{count}" for count in range(1, 100))):
            folder = root / f"run-{stamp}{suffix}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                continue
            return folder
    except OSError as error:
        raise EnvironmentFault(f"state folder {root}: {error.strerror}", remedy="Use another: --state-dir PATH") from error
    raise EnvironmentFault(f"state folder {root}: 100 runs within one second")


def write_run(run: Run) -> None:
    """Write `run.json`, atomically."""
    target = run.folder / RUN_FILE
    fresh = target.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode(run, enc_hook=str))
    fresh.replace(target)


def write_secret(path: Path, text: str) -> Path:
    """A new 0600 file with `text`. FileExistsError if it is there."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    return path


def read_run(folder: Path) -> Run | None:
    """The run of `folder`; None where there is none, or its file is of another version."""
    try:
        return msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=Run, dec_hook=lambda kind, text: kind(text))
    except (OSError, msgspec.MsgspecError):
        return None


def live_runs(root: Path) -> list[Run]:
    """Runs of this state folder whose supervisor lives, oldest first."""
    return [run for run in _all_runs(root) if process_start(run.pid) == run.pid_start]


def is_elsewhere(environ: Mapping[str, str] = os.environ) -> bool:
    """Commands are told where the NATS of their stack is, as in a container: none of its processes is on this machine."""
    return bool(environ.get("SS_NATS_URL") and environ.get("SS_NATS_USER"))


def find_run(root: Path, wanted: str = "") -> Run:
    """The run that commands talk to: the one that has its own NATS, else the newest; `wanted` (else SS_RUN) names another.

    Raises EnvironmentFault if none lives, and as `choose` does. Where SS_NATS_URL and SS_NATS_USER are set, as in a container, it is
    the stack on that NATS, of whose processes nothing is known here.
    """
    if is_elsewhere():
        return _run_elsewhere(read_config(ServiceConfig, os.environ))
    runs = live_runs(root)
    if not runs:
        raise EnvironmentFault(f"no stack is running (looked in {root})", remedy="Start one: slipstream up")
    return choose(runs, wanted)


def choose(runs: Sequence[Run], wanted: str = "") -> Run:
    """Of runs that live. EnvironmentFault, with the list of them, if several could be meant or none is called `wanted` (else SS_RUN)."""
    wanted = wanted or os.environ.get("SS_RUN", "")
    if wanted:
        return _named(runs, wanted, f"no running stack is called {wanted}")
    own = [run for run in runs if not run.joined]
    if len(own) > 1:
        raise EnvironmentFault(f"{len(own)} stacks run here: {own[0].folder.parent}", remedy=_choice(own))
    return own[0] if own else runs[-1]


def find_run_or_last(root: Path, wanted: str = "") -> Run:
    """As `find_run`; where none lives, the newest that ended, rather a stack than who joined one. A run that is named may have ended."""
    wanted = wanted or os.environ.get("SS_RUN", "")
    if wanted:
        return _named(_all_runs(root), wanted, f"no run is called {wanted} (looked in {root})")
    runs = [] if live_runs(root) else _all_runs(root)
    if not runs:
        return find_run(root)
    return next((run for run in reversed(runs) if not run.joined), runs[-1])


def guests_of(host: Run, runs: Iterable[Run]) -> list[Run]:
    """Of `runs`, those that joined `host`: they use its NATS, and cannot outlive it."""
    return [run for run in runs if run.joined and run != host and (run.nats_url, run.namespace) == (host.nats_url, host.namespace)]


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """How a command is told which run it is about."""
    parser.add_argument("--run", default="", metavar="ID", help="of several stacks, this one: its name, or the end of it (else SS_RUN)")
    parser.add_argument("--state-dir", type=Path, metavar="PATH", help="where `up` was told to keep its runs")


def _all_runs(root: Path) -> list[Run]:
    return [run for folder in sorted(root.glob("run-*")) if (run := read_run(folder))]


def _named(runs: Sequence[Run], wanted: str, absent: str) -> Run:
    """`run-20261201-122532`, or the end of that: `122532`."""
    fit = [run for run in runs if run.folder.name == wanted or run.folder.name.endswith(f"-{wanted}")]
    if len(fit) == 1:
        return fit[0]
    if fit:
        raise EnvironmentFault(f"{len(fit)} runs are called {wanted}", remedy=_choice(fit))
    raise EnvironmentFault(absent, remedy=_choice(runs[-5:]))


def _choice(runs: Sequence[Run]) -> str:
    return "Say which:\n" + "\n".join(f"  --run {run.folder.name:<22}  {run.http_url or without_login(run.nats_url)}" for run in runs)


def _run_elsewhere(config: ServiceConfig) -> Run:
    client = os.environ.get("SS_NATS_CLIENT_PASSWORD_FILE")
    return Run(
        folder=config.trace_dir.parent if config.trace_dir else Path("/nonexistent"),
        pid=0,
        pid_start=0,
        version=version("slipstream"),
        namespace=config.namespace,
        nats_url=config.nats_url,
        nats_user=config.nats_user,
        nats_password_file=config.nats_password_file,
        nats_creds=config.nats_creds,
        nats_client_user="client" if client else "",
        nats_client_password_file=Path(client) if client else None,
        nats_client_url=os.environ.get("SS_NATS_CLIENT_URL", ""),
        http_url=os.environ.get("SS_HTTP_URL", ""),
        state="ready",
    )


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in brackets and may hold blanks: count from its end.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def process_age_s(pid: int) -> float:
    """Seconds since a process was started; 0 if it is gone."""
    started = process_start(pid)
    if started is None:
        return 0.0
    return max(float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK"), 0.0)


def remove_stale_arenas(parent: Path, root: Path) -> None:
    """Delete arenas on tmpfs whose run died without cleaning up: they would hold memory until the next boot."""
    kept = {run.kv_dir for run in live_runs(root)}
    for folder in root.glob("run-*"):
        run = read_run(folder)
        if run and run.kv_dir and run.kv_dir not in kept and run.kv_dir.is_relative_to(parent):
            shutil.rmtree(run.kv_dir, ignore_errors=True)
