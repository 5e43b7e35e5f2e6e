"""`slipstream status`: who is there, and how loaded they are."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec

from services.console.fleet_view import read_leases, read_loads, read_model_names, visit
from services.console.run_folder import Run, add_run_flags, find_run, state_dir
from services.console.terminal import Terminal, age_text, narrowed, share_text, without_login
from services.console.usage import Parser
from shared.messages.fleet import WorkerLease, WorkerLoad

_HEADINGS = ("service", "id", "state", "model", "run", "wait", "kv", "speed", "up")
_NUMBERS = {"run": 0, "wait": 0, "kv": 0, "speed": 0, "up": 0}
_ROLE_ORDER = ("gateway", "router", "prefill", "decode", "kvstore", "planner")


def run(argv: Sequence[str]) -> int:
    """The command. Exit 1 if the stack is not ready: a service of the run has no ready lease."""
    parser = Parser(prog="slipstream status", description="The processes of the running stack, and their load.")
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    stack = find_run(state_dir(options.state_dir), options.run)
    leases, loads, models = asyncio.run(_look(stack))
    absent = stack.absent({lease.name for lease in leases if lease.state == "ready"})
    is_ready = stack.state == "ready" and not absent
    if options.json:
        sys.stdout.write(_json(stack, leases, loads, is_ready) + "\n")
    else:
        terminal = Terminal()
        terminal.say(terminal.paint(f"{stack.title} · {stack.http_url or without_login(stack.nats_url)} · {stack.state}", "bold"))
        for line in narrowed(
            [_HEADINGS, *(_row(lease, loads.get(lease.instance), models, time.time_ns()) for lease in leases)],
            terminal.columns,
            ("id", "model", "speed"),
            _NUMBERS,
        ):
            terminal.say(line)
        if absent:
            terminal.say(f"{terminal.mark('warning')} not ready: {', '.join(absent)}")
    return 0 if is_ready else 1


async def _look(stack: Run) -> tuple[list[WorkerLease], dict[str, WorkerLoad], dict[str, str]]:
    async with visit(stack) as (bus, subjects):
        leases = await read_leases(bus, subjects)
        workers = {lease.instance for lease in leases if lease.role in ("prefill", "decode")}
        loads, models = await asyncio.gather(read_loads(bus, subjects, workers), read_model_names(bus, subjects))
    return sorted(leases, key=lambda lease: (_ROLE_ORDER.index(lease.role), lease.name)), loads, models


def _row(lease: WorkerLease, load: WorkerLoad | None, models: Mapping[str, str], now_ns: int) -> tuple[str, ...]:
    kv = f"{share_text(load.num_used_blocks / load.num_blocks)} of {load.num_blocks:,}" if load and load.num_blocks else "–"
    return (
        lease.name,
        lease.instance,
        lease.state,
        models.get(lease.model or "", lease.model or "–"),
        f"{load.num_running}" if load else "–",
        f"{load.num_waiting}" if load else "–",
        kv,
        _speed(load),
        age_text((now_ns - lease.started_at_ns) / 1e9),
    )


def _speed(load: WorkerLoad | None) -> str:
    if load and load.role == "prefill" and load.prefill_tokens_per_s:
        return f"{load.prefill_tokens_per_s:,.0f} tok/s"
    if load and load.role == "decode" and load.step_ms:
        return f"step {load.step_ms:.1f} ms"
    return "–"


def _json(stack: Run, leases: list[WorkerLease], loads: dict[str, WorkerLoad], is_ready: bool) -> str:
    services = [
        {
            **{name: getattr(lease, name) for name in lease.__struct_fields__},
            "load": {name: getattr(load, name) for name in load.__struct_fields__} if (load := loads.get(lease.instance)) else None,
        }
        for lease in leases
    ]
    answer = {
        "run": stack.title,
        "ready": is_ready,
        "state": stack.state,
        "http_url": stack.http_url,
        "nats_url": without_login(stack.nats_url),
        "folder": str(stack.folder),
        "pid": stack.pid,
        "processes": stack.services,
        "services": services,
    }
    return msgspec.json.encode(answer).decode()
