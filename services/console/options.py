"""What `slipstream up` was asked for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from services.console.warm import read_requests
from services.gateway.auth import check_exposure, read_keys
from shared.config import TrueWords, parse_size
from shared.engine.config import EngineConfig
from shared.engine.simulated import Profile, parse_profile
from shared.errors import ConfigError, Unauthorized
from shared.kv.layout import LowerFormat
from shared.types import Numerics, Role

ALL_ROLES: tuple[Role, ...] = ("kvstore", "prefill", "decode", "router", "planner", "gateway")
JOINABLE: tuple[Role, ...] = ("kvstore", "prefill", "decode")
Device = Literal["cpu", "cuda", "sim"]
Dtype = Literal["auto", "float32", "bfloat16"]
_ENGINE = EngineConfig()

MIN_ARENA_BYTES = 4 * 2**20
"""Of the DRAM tier: some blocks of a small model."""


class UpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `up`, checked."""

    roles: tuple[Role, ...] = ALL_ROLES
    prefill: int = 1
    decode: int = 1
    hosts: int = 1
    device: Device = "cpu"
    dtype: Dtype = "auto"
    numerics: Numerics = "default"
    model: str = _ENGINE.model
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
    sim_profile: str = _ENGINE.sim_profile
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
    """Flags → options. A flag that does not parse ends the process with usage and exit 2; ConfigError for what contradicts."""
    parsed = _parser().parse_args(argv)
    fields = {name: value for name, value in vars(parsed).items() if name != "only"}
    options = UpOptions(**fields, roles=parsed.only or ALL_ROLES)
    if options.numerics == "exact" and options.dtype == "bfloat16":
        raise ConfigError("--dtype", options.dtype, "--numerics exact means float32", remedy="Leave --dtype away, or --numerics")
    if options.kv_format != "native" and (options.numerics == "exact" or options.device == "sim"):
        reason = "--numerics exact keeps blocks as they are" if options.numerics == "exact" else "--device sim has exact numbers as blocks"
        raise ConfigError("--kv-format", options.kv_format, reason, remedy="Leave --kv-format away: native")
    if options.nats_creds and not options.nats_url:
        raise ConfigError("--nats-creds", str(options.nats_creds), "is for an existing NATS", remedy="Name it: --nats-url nats://HOST:4222")
    for flag, path in (("--keys", options.keys), ("--nats-creds", options.nats_creds)):
        if path and not path.is_file():
            raise ConfigError(flag, str(path), "no such file")
    if options.warm:
        if "gateway" not in options.roles:
            raise ConfigError("--warm", str(options.warm), "needs a gateway, and --only starts none")
        read_requests(options.warm)
        _check_key(options)
    if "gateway" in options.roles:
        _check_exposure(options)
        if options.port and options.port == options.nats_port and not options.nats_url:
            raise ConfigError("--port", options.port, "is --nats-port too", remedy=f"Use another: --nats-port {options.port + 1}")
    return options


def _check_key(options: UpOptions) -> None:
    """Warming asks as a client does, and a gateway with --keys wants a key."""
    key = os.environ.get("SS_API_KEY", "")
    try:
        read_keys(options.keys).tenant(f"Bearer {key}")
    except Unauthorized as error:
        reason = f"--keys asks every client for a key, and SS_API_KEY is {'none of its keys' if key else 'not set'}"
        remedy = "Set it to a key of that file: SS_API_KEY=… slipstream up …    (a new one: slipstream keys new --file FILE)"
        raise ConfigError("--warm", str(options.warm), reason, remedy=remedy) from error


def _check_exposure(options: UpOptions) -> None:
    try:
        check_exposure(options.host, options.keys, os.environ.get("SS_OPEN", "").lower() in TrueWords)
    except ConfigError as error:
        remedy = "Make keys: slipstream keys new --file keys    then: slipstream up --host … --keys keys\nOr let everybody in: SS_OPEN=1"
        reason = "reachable from other machines, and no key would be asked for"
        raise ConfigError("--host", options.host, reason, remedy=remedy) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream up",
        description="Start the stack and stay in the foreground. Ctrl-C drains and stops it; a second one kills it.",
        epilog="Every service also reads its own SS_… variables; a flag wins over a variable.",
    )
    sizes = parser.add_argument_group("what to start")
    sizes.add_argument("--prefill", type=_count(0), default=1, metavar="N", help="prefill workers (default 1; 0: decode workers do it all)")
    sizes.add_argument("--decode", type=_count(1), default=1, metavar="N", help="decode workers (default 1)")
    sizes.add_argument(
        "--hosts", type=_count(1), default=1, metavar="N", help="KV stores, each with its arena, as if on N machines (default 1)"
    )
    sizes.add_argument("--only", type=_roles, metavar="ROLES", help="join a running stack with: prefill,decode,kvstore")
    model = parser.add_argument_group("model and engine")
    model.add_argument(
        "--model", default=_from_env("model"), metavar="PATH", help="a .gguf file, a folder, or a known name (default %(default)s)"
    )
    model.add_argument(
        "--device", choices=get_args(Device), default=_from_env("device"), help="default cpu; sim: a simulated engine, without torch"
    )
    model.add_argument("--dtype", choices=get_args(Dtype), default=_from_env("dtype"), help="of the weights (default auto)")
    model.add_argument(
        "--numerics", choices=get_args(Numerics), default=_from_env("numerics"), help="exact: float32, the same token for token"
    )
    model.add_argument(
        "--max-model-len", type=_count(0), default=_from_env("max_model_len"), metavar="N", help="tokens (default: the model's)"
    )
    model.add_argument(
        "--threads", type=_count(0), default=_from_env("threads"), metavar="N", help="CPU threads a worker (default: divided)"
    )
    model.add_argument(
        "--sim-profile", type=_sim_profile, default=_from_env("sim_profile"), metavar="A=…", help="times of the simulated engine, ms"
    )
    places = parser.add_argument_group("places")
    places.add_argument(
        "--kv-dram", type=_arena_size, default=os.environ.get("SS_KV_DRAM", "1G"), metavar="SIZE", help="a host's arena (default 1G)"
    )
    places.add_argument(
        "--kv-ssd",
        type=_folder_and_size,
        default=os.environ.get("SS_KV_SSD", ""),
        metavar="PATH:SIZE",
        help="an SSD tier, e.g. /var/tmp/kv:20G",
    )
    places.add_argument(
        "--kv-format",
        choices=get_args(LowerFormat),
        default=_from_env("kv_format"),
        help="how DRAM and SSD keep blocks (default native; int8 and fp8 halve the bytes)",
    )
    places.add_argument("--host", default=os.environ.get("SS_HTTP_HOST", "127.0.0.1"), help="address of the HTTP API (default 127.0.0.1)")
    places.add_argument(
        "--port", type=_port, default=os.environ.get("SS_HTTP_PORT", "8000"), help="port of the HTTP API (default 8000; 0: any)"
    )
    places.add_argument(
        "--keys", type=Path, default=_path_from_env("SS_KEYS_FILE"), metavar="FILE", help="API keys (slipstream keys); without: no key"
    )
    places.add_argument(
        "--warm",
        type=Path,
        metavar="FILE",
        help="requests to compute before the stack is ready, a JSON object a line",
    )
    places.add_argument("--nats-url", default="", metavar="URL", help="use an existing NATS with JetStream instead of starting one")
    places.add_argument("--nats-creds", type=Path, metavar="FILE", help="credentials for it")
    places.add_argument(
        "--nats-port", type=_port, default=4222, metavar="PORT", help="port of the nats-server that is started (default 4222; 0: any)"
    )
    places.add_argument("--namespace", default=os.environ.get("SS_NAMESPACE", "ss"), help="keeps two stacks on one NATS apart (default ss)")
    places.add_argument("--run", default="", metavar="ID", help="with --only: of several stacks, the one to join")
    places.add_argument("--state-dir", type=Path, metavar="PATH", help="logs and state of runs (default ~/.local/state/slipstream)")
    return parser


def _from_env(field: str) -> str:
    """The default of an engine setting: its variable's, else the engine's."""
    return os.environ.get(f"SS_{field.upper()}", str(getattr(_ENGINE, field)))


def _path_from_env(variable: str) -> Path | None:
    return Path(os.environ[variable]).expanduser() if os.environ.get(variable) else None


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _sim_profile(text: str) -> str:
    """`a=0,b=0.2`, as it stands."""
    try:
        parse_profile(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no profile: ms of a step as name=number of {', '.join(Profile.__struct_fields__)}; write for example "
            "a=0,b=0.2,c=1,d=8 (a: of prompt tokens squared, b: of a prompt token, c: of a prompt, d: of decoding, "
            "k: of 1,000 tokens of context)"
        ) from error
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _arena_size(text: str) -> int:
    """Refused here what no arena can be made of: a store that starts, holds nothing and says so late."""
    num_bytes = _size(text)
    if num_bytes < MIN_ARENA_BYTES:
        raise argparse.ArgumentTypeError(f"{text} holds no blocks; the least is {MIN_ARENA_BYTES // 2**20}M")
    return num_bytes


def _folder_and_size(text: str) -> str:
    """`PATH:20G`, or nothing."""
    folder, _, size = text.rpartition(":")
    if text and (not folder or _size(size) < 2**20):
        raise argparse.ArgumentTypeError(f"{text!r} is not PATH:SIZE; write for example /var/tmp/kv:20G")
    return text


def _roles(text: str) -> tuple[Role, ...]:
    """`prefill,decode` → roles. A stack is joined by what computes and stores; the rest belongs to the stack itself."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in JOINABLE]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} cannot join a stack; {', '.join(JOINABLE)} can")
    return tuple(role for role in JOINABLE if role in words)
