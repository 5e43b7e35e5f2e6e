"""A real stack for a test: `slipstream up` with its own state folder and any free ports; checked to leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from loadtest.local_stack import LocalStack, local_stack
from services.console.__main__ import main
from services.console.run_folder import process_start

SIM = ("--device", "sim", "--kv-dram", "64M")
"""The cheapest whole stack."""


@contextlib.contextmanager
def checked_stack(state_dir: Path, *flags: str, environ: Mapping[str, str] | None = None) -> Iterator[LocalStack]:
    """A stack that is ready. At the end it must have stopped cleanly: exit 0, no process, no arena, no password, no traceback."""
    with local_stack(state_dir, *flags, environ=clean(environ)) as stack:
        yield stack
        run = stack.describe()
        assert stack.stop() == 0, stack.output
    assert [name for name, pid in run["services"].items() if process_start(pid)] == []
    assert not (run["kv_dir"] and Path(run["kv_dir"]).exists())
    assert not (Path(run["folder"]) / "nats").exists()
    for log in Path(run["folder"]).glob("*.log"):
        assert "Traceback" not in log.read_text(errors="replace"), log.read_text(errors="replace")[-4000:]


def clean(environ: Mapping[str, str] | None) -> dict[str, str]:
    """The variables given, and none of the caller's own settings."""
    settings = {name: "" for name in os.environ if name.startswith("SS_") and name not in ("SS_CACHE_DIR",)}
    if settings:
        raise RuntimeError(f"unset {', '.join(settings)}: tests choose their own settings")
    return dict(environ or {})


def status_of(stack: LocalStack, capsys: Any) -> dict[str, Any]:
    """What `slipstream status --json` says."""
    capsys.readouterr()
    main(["status", "--json", "--state-dir", str(stack.state_dir)])
    answer: dict[str, Any] = msgspec.json.decode(capsys.readouterr().out)
    return answer


def metric(address: str, name: str, **labels: str) -> float:
    """The sum of a metric over all label sets that contain `labels`, read from a service's /metrics; 0 if there is none."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    total = 0.0
    for match in re.finditer(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
        found = dict(re.findall(r'(\w+)="([^"]*)"', match[1] or ""))
        if labels.items() <= found.items():
            total += float(match[2])
    return total
