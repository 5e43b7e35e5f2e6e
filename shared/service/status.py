"""What a starting process tells its supervisor: JSON lines on a descriptor that it was given."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import SlipstreamError

VARIABLE = "SS_STATUS_FD"

log = logging.getLogger(__name__)


class StatusPipe:
    """One line a call, from any thread: a line is shorter than a pipe's atomic write. Never waits, never fails.

    {"state": "phase", "text", "fraction"} · {"state": "ready", "detail"} · {"state": "failed", "code", "message", "remedy", "exit"}
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            try:
                os.set_blocking(fd, False)
                os.set_inheritable(fd, False)
            except OSError as error:
                log.warning("%s=%d cannot be written: %s", VARIABLE, fd, error.strerror)
                self._fd = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StatusPipe:
        """Read apart from all other settings, so that a bad one of them can be reported. An unusable number is the settings' to refuse."""
        text = environ.get(VARIABLE, "")
        return cls(int(text) if text.isdecimal() else None)

    def phase(self, text: str, fraction: float | None = None) -> None:
        self._write({"state": "phase", "text": text, "fraction": fraction})

    def ready(self, detail: str) -> None:
        self._write({"state": "ready", "detail": detail})

    def failed(self, error: SlipstreamError) -> None:
        self._write(
            {"state": "failed", "code": error.code, "message": error.message[:2000], "remedy": error.remedy[:1000], "exit": error.exit_code}
        )

    def _write(self, line: dict[str, Any]) -> None:
        if self._fd is None:
            return
        try:
            os.write(self._fd, msgspec.json.encode(line) + b"\n")
        except BlockingIOError:  # the supervisor is behind: a phase is out of date by the time that it reads
            log.warning("a status line was dropped: nobody reads them")
        except OSError as error:
            log.warning("nobody reads status lines any more: %s", error.strerror)
            self._fd = None
