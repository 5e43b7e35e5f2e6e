"""What `doctor` looks for in a running stack. Each finding says what it means, and what to do where something can be done."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from services.console.pages import Pages
from services.console.remedy import as_typed_here
from services.console.run_folder import Run
from services.console.terminal import Terminal, folded
from shared.messages.fleet import WorkerLease

_COMMAND = re.compile(r"\b(slipstream|docker|nats|pip) ")
"""Lines of a remedy that hold one stay whole, to be copied."""
State = Literal["done", "warning", "failed"]
NEEDED = {"gateway": "nobody answers over HTTP or NATS", "router": "nothing is routed", "decode": "nothing is generated"}
WANTED = {"kvstore": "no KV is shared or kept", "prefill": "prompts are computed beside decoding", "planner": "nothing is observed"}


class Finding(msgspec.Struct, frozen=True):
    """`done`: as it should be. `warning`: works, could be better. `failed`: does not work."""

    state: State
    text: str
    remedy: str = ""


def show(finding: Finding, terminal: Terminal) -> None:
    """A line, and what to do below it."""
    first, *rest = folded(finding.text, terminal.columns - 4)
    terminal.say(f"  {terminal.mark(finding.state)} {first}")
    for line in rest:
        terminal.say(f"    {line}")
    for line in as_typed_here(finding.remedy).splitlines():
        for part in [line] if _COMMAND.search(line) else folded(line, terminal.columns - 6):
            terminal.say(f"      {part}")


def where(stack: Run) -> str:
    """Which stack is looked at."""
    return f"{stack.title} ({stack.http_url})" if stack.http_url else stack.title


def stack_findings(stack: Run, leases: list[WorkerLease], pages: Pages) -> list[Finding]:
    ready = [lease for lease in leases if lease.state == "ready"]
    # Those of other machines and of guests have leases alone; our own children are known without one.
    names = {lease.name for lease in leases} | ({*stack.services, *stack.away} - {"nats"})
    state: State = "done" if len(ready) == len(names) else "warning"
    others = ", ".join(sorted(names - {lease.name for lease in ready}))
    found = [Finding(state, f"{where(stack)}: {len(ready)} of {len(names)} processes are ready{f', not {others}' if others else ''}")]
    roles = {lease.role for lease in ready}
    found += [
        Finding("failed", f"no {role} is ready: {means}", "slipstream logs " + role) for role, means in NEEDED.items() if role not in roles
    ]
    found += [
        Finding("warning", f"no {role} is ready: {means}", f"slipstream logs {role}") for role, means in WANTED.items() if role not in roles
    ]
    found += [Finding("failed", f"{name} does not answer on /metrics", f"slipstream logs {name}") for name in pages.silent]
    versions = {lease.version for lease in leases}
    if len(versions) > 1:
        found.append(Finding("warning", f"processes of several versions run: {', '.join(sorted(versions))}", "Start them all anew"))
    everything = pages.of()
    for name, labels, text, remedy in _SIGNS:
        number = everything.total(name, **labels)
        if number:
            found.append(Finding("warning", text.format(number).replace(" 1 times", " once"), remedy))
    snapshots = everything.by("slipstream_router_snapshots_total", "outcome")
    failed = sum(number for outcome, number in snapshots.items() if outcome not in ("exact", "gap"))
    if failed:
        text = f"{failed:.0f} looks of the router at a source's blocks failed; it counts as having none (DEGRADED) until one succeeds"
        found.append(Finding("warning", text, "slipstream logs router --level warning"))
    return found


_SIGNS: tuple[tuple[str, dict[str, str], str, str], ...] = (
    (
        "slipstream_bus_events_total",
        {"event": "permission_denied"},
        "NATS refused {:.0f} messages",
        "The users' permissions are not ours: slipstream nats config",
    ),
    (
        "slipstream_bus_events_total",
        {"event": "reconnect"},
        "the connection to NATS was lost and found again {:.0f} times",
        "slipstream logs nats",
    ),
    (
        "slipstream_bus_events_total",
        {"event": "stream_restored"},
        "streams were made again {:.0f} times: somebody deleted them, or NATS began anew (most live in its memory)",
        "slipstream logs nats",
    ),
    (
        "slipstream_leases_lost_total",
        {},
        "processes lost their own lease {:.0f} times: they stood still, or NATS did",
        "More CPU, or fewer workers",
    ),
    ("slipstream_fleet_expired_total", {"role": "decode"}, "decode workers were seen to die {:.0f} times", "slipstream logs decode"),
    (
        "slipstream_task_crashes_total",
        {},
        "{:.0f} tasks inside a service crashed; it was started again",
        "slipstream logs --level error",
    ),
    ("slipstream_engine_errors_total", {}, "{:.0f} engine steps failed", "slipstream logs decode"),
    ("slipstream_router_dead_letters_total", {}, "{:.0f} tasks were given up after three deliveries", "slipstream logs decode"),
    (
        "slipstream_worker_without_kernel_total",
        {},
        "workers run without {:.0f} of their C kernels: KV is copied or packed more slowly",
        "Install gcc and start them again",
    ),
    (
        "slipstream_router_without_kernel_total",
        {},
        "the router runs without its C kernel: decisions take longer",
        "Install gcc and start it again",
    ),
    (
        "slipstream_telemetry_dropped_total",
        {"reason": "collector"},
        "{:.0f} spans did not reach the collector",
        "Is OTEL_EXPORTER_OTLP_ENDPOINT right, and up?",
    ),
    (
        "slipstream_telemetry_dropped_total",
        {"reason": "queue_full"},
        "{:.0f} spans came faster than they were written",
        "Trace fewer: SS_TRACE_SAMPLE=0.1",
    ),
    ("slipstream_telemetry_dropped_total", {"reason": "trace_file"}, "{:.0f} spans could not be written", "Is the disk full? SS_TRACE_DIR"),
    ("slipstream_kv_tier_refused_total", {}, "a tier of the KV store was left out at the start", "slipstream logs kvstore"),
    ("slipstream_kv_ssd_full_total", {}, "the SSD tier found no room {:.0f} times", "Make room on its disk, or give it less: --kv-ssd"),
    ("slipstream_kv_ssd_io_faults_total", {}, "{:.0f} reads and writes of the SSD failed", "Look at the disk: dmesg, smartctl"),
    (
        "slipstream_kv_ssd_deadline_faults_total",
        {},
        "{:.0f} reads and writes of the SSD took too long and counted as misses",
        "Is the disk shared or worn? iostat -x 1",
    ),
    (
        "slipstream_kv_ssd_breaker_opened_total",
        {},
        "the SSD was left alone {:.0f} times after faults in a row",
        "slipstream logs kvstore --level warning",
    ),
    ("slipstream_kv_corrupt_total", {}, "{:.0f} blocks failed their check and were dropped", "Look at the disk and the memory"),
    (
        "slipstream_kv_push_blocks_total",
        {"outcome": "no_secret"},
        "{:.0f} blocks stayed here: the stores share no secret",
        "SS_CLUSTER_SECRET_FILE",
    ),
    (
        "slipstream_decode_preemptions_total",
        {},
        "sequences gave up their blocks {:.0f} times: the device pool is small",
        "More SS_KV_DEVICE, or fewer SS_MAX_NUM_SEQS",
    ),
)
"""A counter that should be 0, what it means, what to do."""
