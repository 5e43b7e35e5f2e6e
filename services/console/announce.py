"""What `up` says first and last."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

from services.console.options import UpOptions
from services.console.run_folder import Run
from services.console.terminal import home_text, size_text, without_login

_CPU_FEATURES = ("amx_tile", "avx512f", "avx2", "asimd")
"""The best one that the processor has is named."""


def header(options: UpOptions) -> str:
    """Versions, machine, and the sizes in effect."""
    machine = {"cpu": _cpu(), "cuda": "CUDA", "sim": "simulated engine"}[options.device]
    parts = [f"slipstream {version('slipstream')}", f"Python {platform.python_version()}", machine]
    if options.num_workers:
        parts.append(f"model {Path(options.model).name}")
        numbers = {"prefill": options.prefill, "decode": options.decode}
        parts.append(", ".join(f"{number} {role}" for role, number in numbers.items() if role in options.roles))
    if "kvstore" in options.roles:
        arenas = f"{options.hosts} x " if options.hosts > 1 else ""
        parts.append(f"KV store {arenas}{size_text(options.kv_dram)} DRAM")
    return " · ".join(parts)


def ready_block(run: Run, elapsed_s: float, flags: str = "", keys: Path | None = None) -> str:
    """The last thing printed: addresses, and lines to copy. `flags` lead other commands to this run, where they would not find it;
    `keys`: who asks needs one of that file."""
    lines = [f"Ready in {elapsed_s:.1f} s", ""]
    if run.http_url:
        lines.append(f"  OpenAI API   {run.http_url}/v1" + (f"    with a key of {home_text(keys)}" if keys else ""))
    lines.append(f"  NATS         {without_login(run.nats_url)}    with a user: slipstream nats url{flags}")
    lines.append(f"  Logs         {home_text(run.folder)}/")
    lines.append("")
    if run.http_url:
        key = "SS_API_KEY=… " if keys else ""
        lines.append(f'  Try          {key}slipstream chat{flags} "What is the capital of France?"')
    lines.append(f"  Watch        slipstream top{flags}")
    lines.append(f"  Stop         Ctrl-C (drains), or: slipstream down{flags}")
    return "\n".join(lines)


def _cpu() -> str:
    num_cores = len(os.sched_getaffinity(0))
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        flags = []
    best = next((feature for feature in _CPU_FEATURES if feature in flags), "")
    return f"CPU {num_cores} core{'s' * (num_cores != 1)}" + (f" ({best})" if best else "")
