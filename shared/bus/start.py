"""From settings to a bus that works, or to one line that says why not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from shared.bus.nats_bus import NatsBus
from shared.bus.wire import Wire
from shared.config import ServiceConfig
from shared.errors import BusError, ConfigError, EnvironmentFault, PermissionDenied

START_S = 10.0
"""How long a server that is not there yet is waited for."""
POLL_S = 0.05
CREDENTIALS = ("BEGIN NATS USER JWT", "BEGIN USER NKEY SEED")


def inbox_prefix_of(user: str) -> str:
    """Each user has reply subjects of its own, which nobody else may read."""
    return f"_INBOX_{user}" if user else "_INBOX"


async def open_bus(wire: Wire, config: ServiceConfig, *, name: str, inbox_prefix: str, wait_s: float) -> NatsBus:
    """Connect `wire` and see that JetStream is there. Raises ConfigError; EnvironmentFault after `wait_s` at the latest."""
    options = _options(config, name, inbox_prefix)
    opening = asyncio.ensure_future(wire.open(options))
    try:
        await _opened(opening, wire, config.nats_url, wait_s)
        bus = NatsBus(wire, wire.clock)
        await bus.open()
        await _check_jetstream(bus, config.nats_url)
    except BaseException:
        await wire.close()
        raise
    return bus


async def _check_jetstream(bus: NatsBus, url: str) -> None:
    try:
        await bus.jetstream.check()
    except PermissionDenied as error:
        raise EnvironmentFault(f"NATS at {url}: {error.message}", remedy=error.remedy) from error
    except BusError as error:
        remedy = "start nats-server with -js, or enable JetStream for this account"
        raise EnvironmentFault(f"NATS at {url} has no JetStream ({error.message})", remedy=remedy) from error


async def _opened(opening: asyncio.Future[None], wire: Wire, url: str, wait_s: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    try:
        while not opening.done() and loop.time() < deadline:
            await asyncio.wait({opening}, timeout=POLL_S)
            if "authorization violation" in str(wire.last_error).lower():
                remedy = "check SS_NATS_USER with SS_NATS_PASSWORD_FILE, or SS_NATS_CREDS"
                raise EnvironmentFault(f"NATS at {url} does not accept the user or password", remedy=remedy)
        if not opening.done():
            cause = wire.last_error or "no answer"
            raise EnvironmentFault(f"cannot reach NATS at {url}: {cause}", remedy="start nats-server, or set SS_NATS_URL to where it is")
        try:
            opening.result()
        except (BusError, ImportError, ValueError) as error:
            raise EnvironmentFault(f"cannot connect to NATS at {url}: {error}", remedy="check SS_NATS_URL and SS_NATS_CREDS") from error
    finally:
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})


def _options(config: ServiceConfig, name: str, inbox_prefix: str) -> dict[str, Any]:
    """What the client is told."""
    options: dict[str, Any] = {
        "servers": [url.strip() for url in config.nats_url.split(",")],
        "name": name,
        "inbox_prefix": inbox_prefix,
    }
    if config.nats_user:
        options["user"] = config.nats_user
    if config.nats_password_file is not None:
        options["password"] = _read("SS_NATS_PASSWORD_FILE", config.nats_password_file).strip()
    if config.nats_creds is not None:
        text = _read("SS_NATS_CREDS", config.nats_creds)
        if not all(mark in text for mark in CREDENTIALS):  # nats-py would look for them for ever
            raise ConfigError("SS_NATS_CREDS", str(config.nats_creds), "is not a NATS credentials file")
        options["user_credentials"] = str(config.nats_creds)
    return options


def _read(variable: str, path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text"
        raise ConfigError(variable, str(path), reason or "cannot be read") from error
