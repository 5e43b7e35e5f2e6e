"""What must be true of the machine before anything is started: each check raises one EnvironmentFault with its remedy."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from services.console.terminal import shortened, size_text, without_login
from shared.errors import ConfigError, EnvironmentFault

_CONNECT_S = 3.0
_OURS = re.compile(r"services\.gateway|nats-server")


class ServerInfo(msgspec.Struct, frozen=True):
    """What a nats-server says of itself in its first line."""

    version: str
    max_payload: int
    jetstream: bool = False
    auth_required: bool = False


def check_port(host: str, port: int, *, flag: str) -> None:
    """EnvironmentFault if `port` cannot be bound, naming who holds it where /proc shows it."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                holder = port_holder(port)
                cause = f"{host}:{port} is in use" + (f" by {holder}" if holder else "")
                ours = "\nOr stop the stack that has it: slipstream down" if _OURS.search(holder) else ""
                raise EnvironmentFault(cause, remedy=f"Use another: slipstream up {flag} {port + 1}{ours}") from error
            remedy = f"Use another: {flag} PORT" if error.errno == errno.EACCES else "Name an address of this machine: --host ADDRESS"
            raise EnvironmentFault(f"{host}:{port} cannot be bound: {error.strerror}", remedy=remedy) from error


def free_port(host: str) -> int:
    """A port that is free now; kept for restarts, so that an address once printed stays true."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def port_holder(port: int) -> str:
    """`pid 4211 (python -m http.server)`; empty where /proc does not show it (another user's process)."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in _lines(table)[1:]
        if (fields := line.split())[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            target = str(descriptor.readlink())
            if target.startswith("socket:[") and target[8:-1] in inodes:
                pid = descriptor.parts[2]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {pid} ({shortened(command, 60)})"
    return ""


def check_shared_memory(folder: Path, num_hosts: int, arena_bytes: int) -> None:
    """EnvironmentFault unless `folder` lies on tmpfs, is ours to write, and has room for the arenas."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EnvironmentFault(foreign(folder), remedy="Set SS_KV_DIR to a folder on tmpfs that is yours")
    kind = file_system(folder)
    if kind not in ("tmpfs", "ramfs", "hugetlbfs"):
        raise EnvironmentFault(
            f"{folder} lies on {kind}, not on tmpfs: KV blocks would be written to a disk",
            remedy="Set SS_KV_DIR to a folder on tmpfs, or mount one: mount -t tmpfs tmpfs PATH",
        )
    room = os.statvfs(folder)
    free, needed = room.f_bavail * room.f_frsize, num_hosts * arena_bytes
    if needed > free:
        fits = max(free // num_hosts // 2**20 * 9 // 10, 0)
        hosts = f"{num_hosts} arenas of " if num_hosts > 1 else ""
        raise EnvironmentFault(
            f"{folder} has {size_text(free)} free, {hosts}{size_text(arena_bytes)} asked for",
            remedy=f"Ask for less: slipstream up --kv-dram {fits}M    or give {folder} more (docker: --shm-size)",
        )


def foreign(folder: Path) -> str:
    """Why a folder cannot be written: whose it is, and who asks."""
    try:
        return f"{folder} cannot be written: it belongs to uid {folder.stat().st_uid}, and this runs as uid {os.getuid()}"
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def file_system(folder: Path) -> str:
    """The type of the file system that holds `folder` (the longest mount point above it)."""
    path = str(folder.resolve())
    best, kind = "", "an unknown file system"
    for line in _lines("/proc/self/mounts"):
        _, mount, mount_kind, *_ = line.split()
        above = mount.rstrip("/")
        if (path == above or path.startswith(above + "/")) and len(mount) >= len(best):
            best, kind = mount, mount_kind
    return kind


async def read_server_info(url: str) -> ServerInfo:
    """The INFO line of the nats-server at `url`; of several, as `URL,URL`, of the first that has one.

    EnvironmentFault: unreachable, or not NATS. ConfigError: not a URL.
    """
    faults = []
    for host, port in [_address(one.strip()) for one in url.split(",")]:
        try:
            return await _ask(host, port)
        except EnvironmentFault as fault:
            faults.append(fault)
    raise EnvironmentFault("; ".join(fault.message for fault in faults), remedy=faults[0].remedy)


async def _ask(host: str, port: int) -> ServerInfo:
    remedy = f"Is nats-server running there?  nats-server -js -a {host} -p {port}\nOr leave --nats-url away: up starts its own"
    try:
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        raise EnvironmentFault(f"NATS at {host}:{port} does not answer within {_CONNECT_S:g} s", remedy=remedy) from None
    except socket.gaierror as error:
        raise EnvironmentFault(f"NATS at {host}:{port} cannot be reached: {error.strerror}", remedy=remedy) from error
    except UnicodeError:  # no name of a machine
        raise ConfigError("--nats-url", host, "not an address", remedy="For example: --nats-url nats://127.0.0.1:4222") from None
    except OSError as error:  # asyncio writes its own text over the system's
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise EnvironmentFault(f"NATS at {host}:{port} cannot be reached: {cause}", remedy=remedy) from error
    except ValueError:  # a line without an end
        line = b""
    verb, _, body = line.partition(b" ")
    try:
        if verb == b"INFO":
            return msgspec.json.decode(body, type=ServerInfo)
    except msgspec.MsgspecError:
        pass
    raise EnvironmentFault(f"{host}:{port} answers, but it is no NATS server", remedy=remedy)


def _address(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname if parts.scheme in ("nats", "tls") else None, 4222 if parts.port is None else parts.port
    except ValueError:  # a port beyond 65535, an unclosed bracket
        host, port = None, 0
    if not host or not port:
        raise ConfigError("--nats-url", without_login(url), "not an address", remedy="For example: --nats-url nats://127.0.0.1:4222")
    return host, port


def check_jetstream(info: ServerInfo, url: str) -> None:
    """EnvironmentFault if the server runs without JetStream."""
    if not info.jetstream:
        raise EnvironmentFault(
            f"NATS at {url} runs without JetStream, which carries the work queues",
            remedy="Start it with JetStream: nats-server -js    (or `jetstream {}` in its configuration)",
        )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
