"""What this machine knows of a run's processes without asking NATS: who is dead, why, and whether their passwords are there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from services.console.findings import Finding
from services.console.run_folder import Run, process_age_s, process_start
from shared.bus.permissions import USERS
from shared.messages.fleet import WorkerLease

TAIL_BYTES = 64 * 2**10
STARTING_S = 10.0
"""Until then a process may be loading its libraries."""
LAST_LINES = 20
"""A complaint further back is of an earlier trouble."""


class Complaint(msgspec.Struct, frozen=True):
    """A line of a log that says what is wrong and what to do."""

    level: str
    message: str
    code: str = ""
    remedy: str = ""


def process_findings(stack: Run) -> list[Finding]:
    """Of a run of this machine; of one elsewhere nothing is known here."""
    if stack.is_elsewhere:
        return []
    return [*_passwords(stack), *_dead(stack)]


def silent_findings(stack: Run, leases: Sequence[WorkerLease]) -> list[Finding]:
    """Processes that live without a lease (it lasts 3 s): to all others they are dead, and their work has been moved."""
    leased = {lease.name for lease in leases} | {"nats"}
    silent = {name: pid for name, pid in stack.services.items() if name not in leased and process_start(pid) is not None}
    return [_silent(stack, name, pid) for name, pid in sorted(silent.items())]


def _silent(stack: Run, name: str, pid: int) -> Finding:
    why, remedy = _why(stack, name)
    age_s = process_age_s(pid)
    if not why and age_s < STARTING_S:
        return Finding("warning", f"{name} was started {age_s:.0f} s ago and is not there yet", f"slipstream logs {name}")
    cause = f"{name} runs (pid {pid}), but its lease has expired: it stands still or is cut off from NATS{why}"
    return Finding(
        "failed", cause, "\n".join(filter(None, (remedy, f"slipstream logs {name}    and, if it hangs: kill {pid} (it is started again)")))
    )


def last_complaint(log: Path) -> Complaint | None:
    """The last error with a code among the last lines of `log`: why a process ended, or cannot begin."""
    try:
        with log.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().splitlines()[-LAST_LINES:]
    except OSError:
        return None
    for line in reversed(lines):
        try:
            told = msgspec.json.decode(line, type=Complaint)
        except msgspec.MsgspecError:
            continue  # a library's words
        if told.level == "error" and told.code:
            return told
    return None


def _dead(stack: Run) -> Iterator[Finding]:
    ended = [name for name, pid in stack.services.items() if process_start(pid) is None]
    for name in sorted({*ended, *stack.away}):
        why, remedy = _why(stack, name)
        remedies = (remedy, f"slipstream logs {name}")
        yield Finding("failed", f"{name} has died and is not back yet{why}", "\n".join(filter(None, remedies)))


def _why(stack: Run, name: str) -> tuple[str, str]:
    """(`: its own last words`, its own remedy), as far as it had any."""
    complaint = last_complaint(stack.folder / f"{name}.log")
    return (f": {complaint.message}", complaint.remedy) if complaint else ("", "")


def _passwords(stack: Run) -> Iterator[Finding]:
    """A process reads its password at its start: one that is gone shows when it is started again."""
    if stack.nats_password_file is None:
        return
    folder = stack.nats_password_file.parent
    gone = [user for user in USERS if not (folder / user).is_file()]
    if gone:
        yield Finding(
            "failed",
            f"NATS passwords are gone from {folder}: {', '.join(gone)}; a process that dies cannot come back",
            "They are made at the start: slipstream down, then slipstream up",
        )
    closed = [user for user in USERS if user not in gone and not os.access(stack.password_dir / user, os.R_OK)]
    if closed:
        yield Finding(
            "failed",
            f"NATS passwords in {folder} cannot be read: {', '.join(closed)}",
            f"chown -R {os.getuid()} {folder}",
        )
