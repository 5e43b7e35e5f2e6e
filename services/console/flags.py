"""The flags of `slipstream up`: their values as they are typed, and where a default comes from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from services.console.usage import Parser, whole_number
from shared.config import parse_size
from shared.engine.config import EngineConfig
from shared.engine.simulated import Profile, parse_profile
from shared.errors import ConfigError
from shared.kv.layout import LowerFormat
from shared.messages.subjects import Subjects
from shared.types import Numerics, Role

JOINABLE: tuple[Role, ...] = ("kvstore", "prefill", "decode")
Device = Literal["cpu", "cuda", "sim"]
Dtype = Literal["auto", "float32", "bfloat16"]
ENGINE = EngineConfig()

MIN_ARENA_BYTES = 4 * 2**20
"""Of the DRAM tier: some blocks of a small model."""
MIN_MODEL_LEN = 64
"""Tokens: the chat template's own, a short question, an answer."""
MAX_MODEL_LEN = 2**20
MAX_PROCESSES = 256
"""Of a role, on one machine."""
MAX_THREADS = 1024

VARIABLES = {
    "--model": "SS_MODEL",
    "--device": "SS_DEVICE",
    "--dtype": "SS_DTYPE",
    "--numerics": "SS_NUMERICS",
    "--max-model-len": "SS_MAX_MODEL_LEN",
    "--threads": "SS_THREADS",
    "--sim-profile": "SS_SIM_PROFILE",
    "--kv-dram": "SS_KV_DRAM",
    "--kv-ssd": "SS_KV_SSD",
    "--kv-format": "SS_KV_FORMAT",
    "--host": "SS_HTTP_HOST",
    "--port": "SS_HTTP_PORT",
    "--keys": "SS_KEYS_FILE",
    "--namespace": "SS_NAMESPACE",
}
"""What counts where a flag is not given, if it is set."""


def is_typed(flag: str, argv: Sequence[str]) -> bool:
    """Whether `flag` stands on the command line; its beginning is enough."""
    return any(word.startswith("--") and len(word) > 2 and flag.startswith(word.partition("=")[0]) for word in argv)


def up_parser() -> Parser:
    """Of all flags of `up`."""
    parser = Parser(
        prog="slipstream up",
        description="Start the stack and stay in the foreground. Ctrl-C drains and stops it; a second one kills it.",
        epilog="Every service also reads its own SS_… variables; a flag wins over a variable.",
    )
    _add_sizes(_Group(parser, "what to start"))
    _add_engine(_Group(parser, "model and engine"))
    _add_places(_Group(parser, "places"))
    _add_nats(_Group(parser, "NATS, and other stacks"))
    return parser


class _Group:
    """Flags under one heading of the help."""

    def __init__(self, parser: Parser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def add(self, flag: str, text: str, default: Any = "", **rules: Any) -> None:
        """A flag; its variable, if set, wins over `default` and is held to the same rules."""
        if "choices" in rules:  # argparse holds only what is typed to them
            rules["type"] = _one_of(rules["choices"])
        self._group.add_argument(flag, default=os.environ.get(VARIABLES.get(flag, ""), default), help=text, **rules)


def _add_sizes(group: _Group) -> None:
    group.add("--prefill", "prefill workers (default 1; 0: decode workers do it all)", 1, type=whole_number(0, MAX_PROCESSES), metavar="N")
    group.add("--decode", "decode workers (default 1)", 1, type=whole_number(1, MAX_PROCESSES), metavar="N")
    group.add(
        "--hosts", "KV stores, each with its arena, as if on N machines (default 1)", 1, type=whole_number(1, MAX_PROCESSES), metavar="N"
    )
    group.add("--only", "join a running stack with: prefill,decode,kvstore", None, type=_roles, metavar="ROLES")


def _add_engine(group: _Group) -> None:
    group.add("--model", "a .gguf file, a folder, or a known name (default %(default)s)", ENGINE.model, type=_word, metavar="PATH")
    group.add("--device", "default cpu; sim: a simulated engine, without torch", ENGINE.device, choices=get_args(Device))
    group.add("--dtype", "of the weights (default auto)", ENGINE.dtype, choices=get_args(Dtype))
    group.add("--numerics", "exact: float32, the same token for token", ENGINE.numerics, choices=get_args(Numerics))
    group.add("--max-model-len", "tokens (default: the model's)", str(ENGINE.max_model_len), type=_model_len, metavar="N")
    group.add("--threads", "CPU threads a worker (default: divided)", str(ENGINE.threads), type=whole_number(0, MAX_THREADS), metavar="N")
    group.add("--sim-profile", "times of the simulated engine, ms", ENGINE.sim_profile, type=_sim_profile, metavar="A=…")


def _add_places(group: _Group) -> None:
    group.add("--kv-dram", "a host's arena (default 1G)", "1G", type=_arena_size, metavar="SIZE")
    group.add("--kv-ssd", "an SSD tier, e.g. /var/tmp/kv:20G", type=_folder_and_size, metavar="PATH:SIZE")
    formats = "how DRAM and SSD keep blocks (default native; int8 and fp8 halve the bytes)"
    group.add("--kv-format", formats, ENGINE.kv_format, choices=get_args(LowerFormat))
    group.add("--host", "address of the HTTP API (default 127.0.0.1)", "127.0.0.1", type=_word)
    group.add("--port", "port of the HTTP API (default 8000; 0: any)", "8000", type=_port)
    group.add("--keys", "API keys (slipstream keys); without: no key", None, type=_path, metavar="FILE")
    group.add("--warm", "requests to compute before the stack is ready, a JSON object a line", None, type=Path, metavar="FILE")
    group.add("--state-dir", "logs and state of runs (default ~/.local/state/slipstream)", None, type=Path, metavar="PATH")


def _add_nats(group: _Group) -> None:
    group.add("--nats-url", "use an existing NATS with JetStream instead of starting one", metavar="URL[,URL…]")
    group.add("--nats-creds", "credentials for it", None, type=Path, metavar="FILE")
    group.add("--nats-port", "port of the nats-server that is started (default 4222; 0: any)", 4222, type=_port, metavar="PORT")
    group.add("--namespace", "keeps two stacks on one NATS apart (default ss)", "ss", type=_namespace, metavar="NAME")
    group.add("--run", "with --only: of several stacks, the one to join", metavar="ID")


# -- values ----------------------------------------------------------------------------------------------------------------
def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return parse


def _model_len(text: str) -> int:
    """0: the model's own. Refused here what a stack would start with, only to refuse every question."""
    num_tokens = whole_number(0, MAX_MODEL_LEN)(text)
    if 0 < num_tokens < MIN_MODEL_LEN:
        raise argparse.ArgumentTypeError(f"{text} tokens hold no question with its answer\nGive at least {MIN_MODEL_LEN}; 0: the model's")
    return num_tokens


def _sim_profile(text: str) -> str:
    """`a=0,b=0.2`, as it stands."""
    try:
        parse_profile(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no profile: ms of a step as name=number of {', '.join(Profile.__struct_fields__)}\n"
            "Write for example a=0,b=0.2,c=1,d=8\n"
            "(a: of prompt tokens squared, b: of a prompt token, c: of a prompt, d: of decoding, k: of 1,000 tokens of context)"
        ) from error
    return text


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _word(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("nothing is named")
    return text


def _namespace(text: str) -> str:
    try:
        return Subjects(text).namespace
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 to 16 of a-z and 0-9") from error


def _path(text: str) -> Path | None:
    """Nothing: none, as a variable that is set to nothing."""
    return Path(text).expanduser() if text else None


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size\nWrite for example 512M or 1G") from error


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
        raise argparse.ArgumentTypeError(f"{text!r} is not PATH:SIZE\nWrite for example /var/tmp/kv:20G")
    return text


def _roles(text: str) -> tuple[Role, ...]:
    """`prefill,decode` → roles. A stack is joined by what computes and stores; the rest belongs to the stack itself."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in JOINABLE]
    if wrong:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} cannot join a stack; {', '.join(JOINABLE)} can")
    return tuple(role for role in JOINABLE if role in words)
