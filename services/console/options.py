"""What `slipstream up` was asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.console.flags import ENGINE, VARIABLES, Device, Dtype, is_typed, up_parser
from services.console.usage import UsageFault
from services.console.warm import read_requests
from services.gateway.auth import Keys, check_exposure, read_keys
from shared.config import TrueWords
from shared.errors import ConfigError, Unauthorized
from shared.kv.layout import LowerFormat
from shared.types import Numerics, Role

ALL_ROLES: tuple[Role, ...] = ("kvstore", "prefill", "decode", "router", "planner", "gateway")


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `up`, checked."""

    roles: tuple[Role, ...] = ALL_ROLES
    prefill: int = 1
    decode: int = 1
    hosts: int = 1
    device: Device = "cpu"
    dtype: Dtype = "auto"
    numerics: Numerics = "default"
    model: str = ENGINE.model
    max_model_len: int = 0
    kv_dram: int = 2**30
    """Bytes of each host's arena."""
    kv_ssd: str = ""
    """PATH:20G, a folder and how much of its disk; empty: no SSD tier."""
    kv_format: LowerFormat = "native"
    host: str = "127.0.0.1"
    port: int = 8000
    """Of the gateway; 0: any free one."""
    nats_url: str = ""
    nats_creds: Path | None = None
    nats_port: int = 4222
    """Of the nats-server that is started; 0: any free one."""
    state_dir: Path | None = None
    run: str = ""
    """The stack that is joined, of several."""
    keys: Path | None = None
    warm: Path | None = None
    """Requests that are computed before the stack says ready."""
    threads: int = 0
    """CPU threads of each worker; 0: the machine's, divided among the workers."""
    sim_profile: str = ENGINE.sim_profile
    namespace: str = "ss"

    @property
    def is_joining(self) -> bool:
        """Only workers and stores: they join a running stack."""
        return "gateway" not in self.roles

    @property
    def num_workers(self) -> int:
        return self.prefill * ("prefill" in self.roles) + self.decode * ("decode" in self.roles)

    @property
    def worker_threads(self) -> int:
        """CPU threads of each worker."""
        return self.threads or max(len(os.sched_getaffinity(0)) // max(self.num_workers, 1), 1)


def parse_options(argv: Sequence[str]) -> UpOptions:
    """Flags → options. UsageFault for a flag that does not parse; ConfigError for what contradicts, or names what is not there."""
    try:
        parsed = up_parser().parse_args(argv)
    except UsageFault as fault:
        raise UsageFault(fault.reason, flag=_source(fault.flag, argv), remedy=fault.remedy) from None
    fields = {name: value for name, value in vars(parsed).items() if name != "only"}
    options = UpOptions(**fields, roles=parsed.only or ALL_ROLES)
    _check_numbers(options, argv)
    if options.run and not options.is_joining:
        raise ConfigError("--run", options.run, "names a stack to join", remedy="Say with what: --only prefill,decode,kvstore")
    if options.nats_creds and not options.nats_url:
        raise ConfigError("--nats-creds", str(options.nats_creds), "is for an existing NATS", remedy="Name it: --nats-url nats://HOST:4222")
    for flag, path in (("--keys", options.keys), ("--nats-creds", options.nats_creds)):
        if path and not path.is_file():
            raise ConfigError(_source(flag, argv), str(path), "no such file")
    if options.warm and "gateway" not in options.roles:
        raise ConfigError("--warm", str(options.warm), "needs a gateway, and --only starts none")
    if options.warm:
        read_requests(options.warm)
    if "gateway" in options.roles:
        keys = read_keys(options.keys, _source("--keys", argv))
        if options.warm:
            _check_key(options.warm, keys)
        _check_exposure(options, argv)
        if options.port and options.port == options.nats_port and not options.nats_url:
            raise ConfigError(
                _source("--port", argv), options.port, "is --nats-port too", remedy=f"Use another: --nats-port {options.port + 1}"
            )
    return options


def _source(flag: str, argv: Sequence[str]) -> str:
    """Where a value comes from, as whoever gave it knows it: `flag` itself, or the variable that stands for it."""
    variable = VARIABLES.get(flag, "")
    return variable if variable in os.environ and not is_typed(flag, argv) else flag


def _check_numbers(options: UpOptions, argv: Sequence[str]) -> None:
    if options.numerics == "exact" and options.dtype == "bfloat16":
        remedy = "Leave --dtype away, or --numerics"
        raise ConfigError(_source("--dtype", argv), options.dtype, "--numerics exact means float32", remedy=remedy)
    if options.kv_format != "native" and (options.numerics == "exact" or options.device == "sim"):
        reason = "--numerics exact keeps blocks as they are" if options.numerics == "exact" else "--device sim has exact numbers as blocks"
        raise ConfigError(_source("--kv-format", argv), options.kv_format, reason, remedy="Leave --kv-format away: native")


def _check_key(warm: Path, keys: Keys) -> None:
    """Warming asks as a client does, and a gateway with --keys wants a key."""
    key = os.environ.get("SS_API_KEY", "")
    try:
        keys.tenant(f"Bearer {key}")
    except Unauthorized as error:
        reason = f"--keys asks every client for a key, and SS_API_KEY is {'none of its keys' if key else 'not set'}"
        remedy = "Set it to a key of that file: SS_API_KEY=… slipstream up …    (a new one: slipstream keys new --file FILE)"
        raise ConfigError("--warm", str(warm), reason, remedy=remedy) from error


def _check_exposure(options: UpOptions, argv: Sequence[str]) -> None:
    try:
        check_exposure(options.host, options.keys, os.environ.get("SS_OPEN", "").lower() in TrueWords)
    except ConfigError as error:
        remedy = "Make keys: slipstream keys new --file keys    then: slipstream up --host … --keys keys\nOr let everybody in: SS_OPEN=1"
        reason = "reachable from other machines, and no key would be asked for"
        raise ConfigError(_source("--host", argv), options.host, reason, remedy=remedy) from error
