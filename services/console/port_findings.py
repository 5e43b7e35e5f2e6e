"""The ports of the stacks that run here, or those that the next one would want."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from services.console.findings import Finding
from services.console.preflight import port_holder
from services.console.run_folder import Run


class Door(NamedTuple):
    """A port of `up`: its flag and default, which process listens there, and by what in its command line that is known."""

    flag: str
    default: int
    process: str
    program: str


HTTP = Door("--port", 8000, "gateway", "services.gateway")
NATS = Door("--nats-port", 4222, "nats", "nats-server")


def port_findings(runs: Sequence[Run]) -> list[Finding]:
    """Of each stack in `runs`, all of them alive; without any, of the defaults of `up`."""
    if not any(run.state == "ready" for run in runs):
        return [_wanted(HTTP), _wanted(NATS)]
    return [finding for run in runs if run.state == "ready" for finding in _taken(run)]


def _wanted(door: Door) -> Finding:
    holder = port_holder(door.default)
    if holder and door.program not in holder:
        text = f"port {door.default}, the default of {door.flag}, is in use by {holder}"
        return Finding("warning", text, f"slipstream up {door.flag} {door.default + 1}")
    return Finding("done", f"port {door.default}, the default of {door.flag}, is {'ours' if holder else 'free'}")


def _taken(run: Run) -> Iterator[Finding]:
    """A guest has no port of its own, nor has who uses a NATS that was there."""
    for door, url, is_own in ((HTTP, run.http_url, bool(run.http_url)), (NATS, run.nats_url, bool(run.nats_user) and not run.joined)):
        if not is_own:
            continue
        port = urlsplit(url).port
        assert port
        holder, owner = port_holder(port), f"{door.process} of {run.folder.name}"
        if door.program in holder:
            yield Finding("done", f"port {port}: {owner} listens")
        elif holder:
            remedy = f"End it, or start the stack anew elsewhere: slipstream up {door.flag} {port + 1}"
            yield Finding("failed", f"port {port} of {owner} is in use by {holder}", remedy)
        else:
            yield Finding("warning", f"port {port}: nobody listens, and {owner} should", f"slipstream logs {door.process}")
