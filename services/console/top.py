"""`slipstream top`: the running stack, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Sequence

import msgspec

from services.console.figures import Look, figures
from services.console.fleet_view import read_leases, read_loads, visit
from services.console.pages import read_pages
from services.console.run_folder import add_run_flags, find_run, state_dir
from services.console.terminal import Terminal, age_text, clip, share_text, size_text, table
from services.console.usage import Parser, number

_HOME, _CLEAR_LINE, _CLEAR_BELOW, _HIDE, _SHOW = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"
_WHOLE = "\x1b[2J"
_ORDER = ("gateway", "router", "prefill", "decode", "kvstore", "planner")
_WIDTHS = {"run": 4, "wait": 4, "kv": 4, "step": 8, "cpu": 5, "memory": 8, "up": 4}
"""Of what changes from look to look: so that nothing beside it moves."""


def run(argv: Sequence[str]) -> int:
    """The command; until Ctrl-C."""
    parser = Parser(
        prog="slipstream top", description="The running stack, live: workers, queues, tiers, hit rates, latencies. Ctrl-C ends it."
    )
    parser.add_argument("--interval", type=number(0.1, 3600), default=1.0, metavar="S", help="between two looks (default 1)")
    parser.add_argument("--once", action="store_true", help="one screen, after one interval")
    parser.add_argument("--json", action="store_true", help="an object a look, a line each, for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt):  # how it is meant to end
        asyncio.run(_watch(options))
    return 0


async def _watch(options: argparse.Namespace) -> None:
    terminal = Terminal()
    stack = find_run(state_dir(options.state_dir), options.run)
    redraws = terminal.is_live and not (options.once or options.json)
    async with visit(stack) as (bus, subjects):

        async def look() -> Look:
            leases = await read_leases(bus, subjects)
            workers = {lease.instance for lease in leases if lease.role in ("prefill", "decode")}
            loads, pages = await asyncio.gather(read_loads(bus, subjects, workers), read_pages(leases))
            leases.sort(key=lambda lease: (_ORDER.index(lease.role), lease.name))
            return Look(time.monotonic(), leases, loads, pages)

        before, look_s = await look(), 0.0
        try:
            if redraws:
                terminal.stream.write(_HIDE + _WHOLE)
            while True:
                # The look itself waits for the workers' reports, so what it takes is part of the interval.
                await asyncio.sleep(max(before.at_s + options.interval - time.monotonic() - look_s, 0.0))
                began_s = time.monotonic()
                after = await look()
                look_s = time.monotonic() - began_s
                if options.json:
                    sys.stdout.write(msgspec.json.encode(figures(before, after)).decode() + "\n")
                    sys.stdout.flush()
                else:
                    absent = stack.absent({lease.name for lease in after.leases if lease.state == "ready"})
                    lines = screen(before, after, stack.http_url, terminal, absent)
                    terminal.say(_redrawn(lines) if redraws else "\n".join(lines))
                if options.once:
                    return
                before = after
        finally:
            if redraws:
                terminal.stream.write(_SHOW)
                terminal.stream.flush()


def _redrawn(lines: Sequence[str]) -> str:
    """In place of what stood there. A line that wrapped, or one too many, would scroll the screen."""
    columns, rows = shutil.get_terminal_size()
    return _HOME + "\n".join(clip(line, columns) + _CLEAR_LINE for line in lines[: rows - 1]) + _CLEAR_BELOW


def screen(before: Look, after: Look, http_url: str, terminal: Terminal, absent: Sequence[str] = ()) -> list[str]:
    """The figures for people. `absent`: processes that should be there."""
    told = figures(before, after)
    hit = "" if told["hit_rate"] is None else f" · {told['hit_rate']:>4.0%} of them from a cache"
    lines = [
        f"{terminal.paint('slipstream', 'bold')}  {time.strftime('%H:%M:%S')}  {http_url}",
        "",
        f"requests  {told['running']:>7,.0f} running · {told['queued']:>7,.0f} waiting · {told['requests_per_s']:>7,.1f}/s ended"
        + _alarm(told["errors_per_s"], "errors", "red", terminal)
        + _alarm(told["migrated_per_s"], "moved", "yellow", terminal),
        f"tokens    {told['output_tokens_per_s']:>7,.0f}/s out   · {told['prompt_tokens_per_s']:>7,.0f}/s in{hit}",
        f"latency   first token     {_quantiles(told['ttft_ms'])}",
        f"          between tokens  {_quantiles(told['itl_ms'])}",
    ]
    for tier, one in told["tiers"].items():
        lines.append(
            f"{tier:<8}  {_bar(one['used_bytes'], one['bytes'])} {size_text(one['used_bytes']):>8} of {size_text(one['bytes'])} · "
            f"{one['blocks']:>7,.0f} blocks · {one['loaded_blocks_per_s']:>6,.0f}/s loaded"
        )
    misses = [f"{value:>7,.0f}/s {reason}" for reason, value in sorted(told["miss_tokens_per_s"].items()) if value > 0]
    lines.append("computed  " + (" · ".join(misses) or "–"))
    rows: list[Sequence[str]] = [("service", "state", *_WIDTHS)]
    for lease, one in zip(after.leases, told["services"], strict=True):
        rows.append(
            (
                lease.name,
                f"{lease.state:<8}",
                f"{one['running']}" if one["running"] is not None else "–",
                f"{one['waiting']}" if one["waiting"] is not None else "–",
                f"{share_text(one['used_blocks'] / one['blocks']):>4} of {one['blocks']:,}" if one["blocks"] else "–",
                f"{one['step_ms']:.1f} ms" if one["step_ms"] else "–",
                f"{one['cpu_share']:.0%}",
                size_text(one["memory_bytes"]),
                age_text(time.time() - lease.started_at_ns / 1e9),
            )
        )
    lines += ["", *table(rows, _WIDTHS)]
    if absent:
        lines.append(f"{terminal.mark('warning')} not ready: {', '.join(absent)}")
    if after.pages.silent:
        lines.append(f"{terminal.mark('warning')} no /metrics from {', '.join(after.pages.silent)}")
    return lines


def _alarm(per_s: float, what: str, colour: str, terminal: Terminal) -> str:
    return " · " + terminal.paint(f"{per_s:.1f}/s {what}", colour) if per_s else ""


def _quantiles(values: dict[str, float | None]) -> str:
    if not any(value is not None for value in values.values()):
        return "–"
    return " · ".join(f"{name} {value:>6,.0f}" for name, value in values.items() if value is not None) + " ms"


def _bar(part: float, whole: float, width: int = 14) -> str:
    filled = round(width * part / whole) if whole else 0
    return "█" * filled + "░" * (width - filled)
