"""Finished spans in a file of JSON lines: what `slipstream trace` reads."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.telemetry.telemetry import Span

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)


class TraceLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace file."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    """As in `Span`."""


class TraceFile:
    """`<trace_dir>/<name>.jsonl`, appended to. At 64 MiB it becomes `<name>.jsonl.1` in place of the last one; on a full disk both go.

    A folder that cannot be written costs its spans and not the service: it is said at the start, and tried again at each batch.
    """

    label = "trace_file"
    every_s = 0.25  # whoever asks for the trace of what just ended waits for it

    def __init__(self, path: Path, service: str, instance: str, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._service = service
        self._instance = instance
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._fd: int | None = None
        try:
            self._fd = self._open()
        except OSError as error:
            reason = error.strerror or str(error)
            log.warning("traces cannot be written to %s: %s", path, reason, extra={"remedy": "Set SS_TRACE_DIR to a writable folder"})

    def write(self, spans: Sequence[Span]) -> None:
        """Raises OSError if they could not be written."""
        fd = self._open() if self._fd is None else self._fd
        data = b"".join(self._line(span) for span in spans)
        if self._num_bytes and self._num_bytes + len(data) > self._max_bytes:
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            os.close(fd)
            self._fd = None
            fd = self._open()
        self._fd = fd
        try:
            os.write(fd, data)  # one call: lines of two processes in one file never mix
        except OSError as error:
            if error.errno in _FULL:
                self._make_room(fd)
            raise
        self._num_bytes += len(data)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _make_room(self, fd: int) -> None:
        """A disk is not kept full by old traces: what comes next is worth more."""
        self._path.with_name(self._path.name + ".1").unlink(missing_ok=True)
        os.ftruncate(fd, 0)
        self._num_bytes = 0

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._num_bytes = os.fstat(fd).st_size
        return fd

    def _line(self, span: Span) -> bytes:
        line = TraceLine(
            span.trace_id,
            span.span_id,
            span.parent_id,
            span.name,
            self._service,
            self._instance,
            span.start_ns,
            span.end_ns,
            span.attributes,
        )
        return msgspec.json.encode(line) + b"\n"
