"""Logs: one JSON object a line on stderr. Ids come as `extra=`; text of prompts and answers never does."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from shared.errors import ConfigError
from shared.telemetry import propagation

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

EXTRAS = ("request_id", "trace_id", "epoch", "worker", "host", "model", "subject", "code", "remedy")
"""What `extra=` may add to a line. A fixed list, so that nothing else gets out by accident."""

# The exporter says at every batch what the span writer says once a minute.
_CHATTY = {"nats": logging.WARNING, "urllib3": logging.WARNING, "uvicorn": logging.WARNING, "opentelemetry": logging.CRITICAL}


_request: ContextVar[tuple[str, str]] = ContextVar("request", default=("", ""))
"""(request id, traceparent) of what the running task works on."""


def concern(request_id: str, traceparent: str) -> None:
    """From here on, lines of this task and of those it starts carry the request's ids. For a task that works on one request only."""
    _request.set((request_id, traceparent))


def ids_of(request_id: str, traceparent: str) -> dict[str, str]:
    """The same for one line, as `extra=`: where one task works on many requests."""
    trace = propagation.parse(traceparent)
    return {"request_id": request_id, "trace_id": trace.trace_id if trace else ""}


class JsonFormatter(logging.Formatter):
    """{"time", "level", "service", "instance", "logger", "message", extras, "traceback"}."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._who = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {"time": time, "level": record.levelname.lower(), **self._who, "logger": record.name}
        line["message"] = record.getMessage()
        line |= {name: value for name, value in ids_of(*_request.get()).items() if value}
        line |= {name: record.__dict__[name] for name in EXTRAS if name in record.__dict__}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def set_up_logs(service: str, instance: str, level: str, stream: TextIO | None = None) -> None:
    """Send all logs of this process to `stream` (stderr). Raises ConfigError for an unknown level."""
    if level.lower() not in LEVELS:
        raise ConfigError("SS_LOG_LEVEL", level, f"must be one of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service, instance))
    logging.basicConfig(handlers=[handler], level=LEVELS[level.lower()], force=True)
    logging.captureWarnings(True)
    for name, at_least in _CHATTY.items():
        logging.getLogger(name).setLevel(at_least)
