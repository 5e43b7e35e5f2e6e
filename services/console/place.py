"""The places of a run: its folder, its ports, its arenas. Checked first, made second."""

from __future__ import annotations

import contextlib
import os
import secrets
from importlib.metadata import version
from pathlib import Path

from services.console.options import UpOptions
from services.console.preflight import check_port, check_shared_memory, free_port
from services.console.run_folder import Run, create_run_folder, find_run, process_start, remove_stale_arenas, write_secret
from services.console.topology import Place
from shared.errors import EnvironmentFault

SHARED_MEMORY = Path("/dev/shm")


def choose_http_port(options: UpOptions) -> int:
    """The gateway's port: kept for the run, so that the address once printed stays true. EnvironmentFault if it is taken."""
    port = options.port or free_port(options.host)
    check_port(options.host, port, flag="--port")
    return port


def check_arenas(options: UpOptions, root: Path) -> None:
    """Room for the arenas on tmpfs, after those of runs that died without cleaning up are gone."""
    parent = _arena_parent()
    remove_stale_arenas(parent, root)
    check_shared_memory(parent, options.hosts, options.kv_dram)


def prepare_place(options: UpOptions, root: Path, http_port: int) -> tuple[Run, Place]:
    """Make the run's folder, its arenas' folders, the cluster secret. EnvironmentFault for what is in the way."""
    joined = find_run(root, options.run) if options.is_joining and not options.nats_url else None
    folder = create_run_folder(root)
    secret_file = joined.cluster_secret_file if joined else None
    secret_file = secret_file or _cluster_secret(root)
    kv_dir, num_hosts = _arenas(_arena_parent(), options, joined)
    pid = os.getpid()
    started = process_start(pid)
    assert started is not None
    run = Run(
        folder=folder,
        pid=pid,
        pid_start=started,
        version=version("slipstream"),
        namespace=options.namespace,
        nats_url=options.nats_url,
        http_url=f"http://{_reachable(options.host)}:{http_port}" if http_port else "",
        kv_dir=kv_dir if "kvstore" in options.roles else None,
        num_hosts=num_hosts,
        cluster_secret_file=secret_file,
        joined=options.is_joining,
    )
    place = Place(
        folder=folder,
        nats_url=options.nats_url,
        kv_dir=kv_dir,
        num_hosts=num_hosts,
        cluster_secret_file=secret_file,
        http_port=http_port,
        joined=joined,
    )
    return run, place


def _arena_parent() -> Path:
    return Path(os.environ.get("SS_KV_DIR", SHARED_MEMORY))


def _arenas(parent: Path, options: UpOptions, joined: Run | None) -> tuple[Path | None, int]:
    """The folder with one folder an arena, and how many: new ones with our own stores, else those of the stack that is joined."""
    if "kvstore" not in options.roles:
        return (joined.kv_dir, joined.num_hosts) if joined and joined.kv_dir else (None, 0)
    folder = parent / f"slipstream-{os.getuid()}-{os.getpid()}"
    for index in range(options.hosts):
        (folder / f"host-{index}").mkdir(parents=True, mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder, options.hosts


def _cluster_secret(root: Path) -> Path:
    """SS_CLUSTER_SECRET_FILE, else the one of this state folder: made once, kept, 0600."""
    given = os.environ.get("SS_CLUSTER_SECRET_FILE")
    if given:
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            raise EnvironmentFault(f"SS_CLUSTER_SECRET_FILE: {path}: no such file", remedy="Leave it unset: one is made")
        return path
    path = root / "cluster.secret"
    with contextlib.suppress(FileExistsError):
        write_secret(path, secrets.token_hex(32))
    return path


def _reachable(host: str) -> str:
    """An address that clients on this machine can use: a wildcard is none."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host
