"""Remedies as they are typed where the stack runs: of containers the engine has the logs, and `slipstream logs` has none."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

LOGS_VARIABLE = "SS_LOGS_COMMAND"
"""Set where logs are read otherwise: `docker compose logs`. The name of a service follows it."""
_LOGS = re.compile(r"slipstream logs(?: ([a-z]+)[a-z0-9-]*)?(?: --level \w+)?")


def logs_command(environ: Mapping[str, str] = os.environ) -> str:
    """How all logs are read here; "" where `slipstream logs` does it."""
    return environ.get(LOGS_VARIABLE, "")


def as_typed_here(remedy: str, environ: Mapping[str, str] = os.environ) -> str:
    """`slipstream logs decode-3fa2b1 --level warning` → `docker compose logs decode`, where logs are read so."""
    command = logs_command(environ)
    return _LOGS.sub(lambda found: f"{command} {found[1] or ''}".rstrip(), remedy) if command else remedy
