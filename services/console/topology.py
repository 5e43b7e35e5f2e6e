"""Which processes a stack is made of, and the environment of each. Pure: options in, specs out."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from services.console.child import ChildSpec
from services.console.options import UpOptions
from services.console.run_folder import Run
from shared.config import ServiceConfig, to_environ
from shared.engine.config import EngineConfig
from shared.types import Role


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one run's processes find things."""

    folder: Path
    """The run's folder: traces."""
    nats_url: str
    nats_users: Mapping[str, tuple[str, Path]] = {}
    """Role → user and password file. Empty: credentials, or none."""
    nats_creds: Path | None = None
    kv_dir: Path | None = None
    """On tmpfs, one folder a host; None: no store."""
    num_hosts: int = 0
    cluster_secret_file: Path
    http_port: int = 0
    joined: Run | None = None
    """The stack on this machine whose NATS and secret are used."""


def service_specs(options: UpOptions, place: Place, environ: Mapping[str, str], first_numbers: Mapping[Role, int]) -> list[ChildSpec]:
    """One spec a process, in the order in which they are shown. `first_numbers`: the first that a joined stack has not taken."""
    specs: list[ChildSpec] = []
    for role in options.roles:
        for index in range(_num_processes(options, role)):
            number = index + first_numbers.get(role, 0)
            name = role if role in ("router", "planner", "gateway") else f"{role}-{number}"
            variables = dict(_variables(options, place, role, index, name))
            specs.append(
                ChildSpec(
                    name,
                    role,
                    # -P: the folder that `up` was called in must not shadow our packages.
                    (sys.executable, "-P", "-m", f"services.{role}"),
                    {**environ, **variables},
                    detail=_detail(options, role),
                )
            )
    return specs


def host_of(role: Role, index: int, num_hosts: int) -> int:
    """The arena a process maps. Prefill counts up and decode down, so that two hosts with one worker of each have one on either side."""
    return num_hosts - 1 - index % num_hosts if role == "decode" else index % num_hosts


def _num_processes(options: UpOptions, role: Role) -> int:
    match role:
        case "prefill":
            return options.prefill
        case "decode":
            return options.decode
        case "kvstore":
            return options.hosts
        case _:
            return 1


def _variables(options: UpOptions, place: Place, role: Role, index: int, name: str) -> Iterator[tuple[str, str]]:
    user, password_file = place.nats_users.get(role, ("", None))
    service = ServiceConfig(
        name=name,
        namespace=options.namespace,
        nats_url=place.nats_url,
        nats_user=user,
        nats_password_file=password_file,
        nats_creds=place.nats_creds,
        trace_dir=place.folder / "traces",
    )
    # Defaults are left to the service, so that a variable of the user's own environment still counts.
    defaults = to_environ(ServiceConfig())
    yield from ((key, value) for key, value in to_environ(service).items() if defaults.get(key) != value or key == "SS_NATS_URL")
    yield "PYTHONUNBUFFERED", "1"
    yield "OMP_NUM_THREADS", str(options.worker_threads if role in ("prefill", "decode") else 1)
    yield "SS_CLUSTER_SECRET_FILE", str(place.cluster_secret_file)
    if place.kv_dir and role in ("kvstore", "prefill", "decode"):
        yield "SS_KV_DIR", str(place.kv_dir / f"host-{host_of(role, index, place.num_hosts)}")
    match role:
        case "kvstore":
            yield "SS_KV_DRAM", str(options.kv_dram)
            if options.kv_ssd:
                folder, _, size = options.kv_ssd.rpartition(":")
                yield "SS_KV_SSD", f"{Path(folder).expanduser().absolute() / f'host-{index}'}:{size}"
        case "prefill" | "decode":
            yield from _engine_variables(options)
        case "gateway":
            yield "SS_HTTP_HOST", options.host
            yield "SS_HTTP_PORT", str(place.http_port)
            if options.keys:
                yield "SS_KEYS_FILE", str(options.keys.expanduser().absolute())


def _engine_variables(options: UpOptions) -> Iterator[tuple[str, str]]:
    path = Path(options.model).expanduser()
    engine = EngineConfig(
        model=str(path.absolute()) if path.exists() else options.model,
        device=options.device,
        dtype=options.dtype,
        numerics=options.numerics,
        max_model_len=options.max_model_len,
        threads=options.worker_threads,
        kv_format=options.kv_format,
        sim_profile=options.sim_profile,
    )
    asked_for = ("model", "device", "dtype", "numerics", "max_model_len", "threads", "kv_format", "sim_profile")
    values = to_environ(engine)
    for field in asked_for:
        variable = f"SS_{field.upper()}"
        yield variable, values[variable]


def _detail(options: UpOptions, role: Role) -> str:
    """What the supervisor itself decided about a process."""
    if role in ("prefill", "decode") and options.device != "sim":
        return f"{options.worker_threads} thread{'s' * (options.worker_threads > 1)}"
    return ""
