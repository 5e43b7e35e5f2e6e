"""A start that failed, written down: `doctor` says why even when the terminal that showed it is gone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from services.console.findings import Finding
from services.console.terminal import age_text

FILE = "last-start.json"


class FailedStart(msgspec.Struct, frozen=True, kw_only=True):
    """`at_s`: wall clock. `phase`: what was being started."""

    at_s: float
    phase: str
    message: str
    remedy: str


def note_failed_start(root: Path, failed: FailedStart) -> None:
    """Best effort: it has been printed already, and a state folder that cannot be written is a finding of its own."""
    with contextlib.suppress(OSError):
        (root / FILE).write_bytes(msgspec.json.encode(failed))


def forget_failed_start(root: Path) -> None:
    """A stack of this state folder is ready."""
    with contextlib.suppress(OSError):
        (root / FILE).unlink(missing_ok=True)


def failed_start_findings(root: Path, now_s: float) -> list[Finding]:
    """None if the last start went well, or there was none."""
    try:
        failed = msgspec.json.decode((root / FILE).read_bytes(), type=FailedStart)
    except (OSError, msgspec.MsgspecError):
        return []
    age = age_text(now_s - failed.at_s)
    return [Finding("failed", f"the last start failed {age} ago at {failed.phase}: {failed.message}", failed.remedy or "slipstream logs")]
