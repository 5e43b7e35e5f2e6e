"""Settings: a frozen msgspec struct a service, read once from the environment.

A field `http_port` is set by `SS_HTTP_PORT`. A nested struct is flattened (its fields have no prefix), so that services share
parts without inheriting. A value that does not fit stops the process and names the variable.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from shared.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_SCALE = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Bytes = Annotated[int, "bytes"]
"""A number of bytes; written 512M or 1G in the environment and on the command line."""

FalseWords = {"0", "false", "no", "off", ""}
TrueWords = {"1", "true", "yes", "on"}


def parse_size(text: str) -> int:
    """`1G`, `512M`, `1.5GiB`, `4096` → bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ValueError("not a size; write for example 512M or 1G")
    return int(float(match[1]) * _SCALE[match[2].upper()])


def variable_of(field: str) -> str:
    """Field name → environment variable."""
    return f"SS_{field.upper()}"


def read_config(config_type: type[C], environ: Mapping[str, str]) -> C:
    """Read `config_type` from `environ`. Raises ConfigError for a value that does not parse or is out of range."""
    return msgspec.structs.replace(_read(config_type, environ))


def _read(config_type: type[C], environ: Mapping[str, str]) -> C:
    hints = typing.get_type_hints(config_type, include_extras=True)
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(config_type):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            values[field.name] = _read(hint, environ)
            continue
        variable = variable_of(field.name)
        text = environ.get(variable)
        if text is None:
            if field.required:
                raise ConfigError(variable, "", "is required and not set")
            continue
        values[field.name] = _parse(variable, text, hint)
    return config_type(**values)


def _parse(variable: str, text: str, hint: Any) -> Any:
    plain, is_optional = _plain(hint)
    if is_optional and text == "":
        return None
    try:
        if plain is bool:
            return _parse_bool(text)
        if plain is Path:
            return Path(text).expanduser()
        if typing.get_origin(hint) is Annotated and "bytes" in hint.__metadata__:
            return parse_size(text)
        return msgspec.convert(text, hint, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError(variable, text, str(error).split(" - at")[0]) from error


def _plain(hint: Any) -> tuple[Any, bool]:
    """Strip Annotated and `| None`: (type, is optional)."""
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        others = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(others) == 1:
            return others[0], True
    return hint, False


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in TrueWords:
        return True
    if word in FalseWords:
        return False
    raise ValueError("not yes or no; write 1 or 0")


def to_environ(config: msgspec.Struct) -> dict[str, str]:
    """The variables that make `read_config` return `config`: what a supervisor gives its children."""
    environ: dict[str, str] = {}
    for field in msgspec.structs.fields(type(config)):
        value = getattr(config, field.name)
        if isinstance(value, msgspec.Struct):
            environ |= to_environ(value)
        elif isinstance(value, bool):
            environ[variable_of(field.name)] = "1" if value else "0"
        elif value is not None:
            environ[variable_of(field.name)] = str(value)
    return environ


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every service is told. Part of each service's own config as field `service`."""

    name: str = ""
    """What people call the process: decode-0. Empty: the role."""
    namespace: str = "ss"
    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password_file: Path | None = None
    """A 0600 file with the password of `nats_user`."""
    nats_creds: Path | None = None
    """A NATS credentials file (an existing cluster)."""
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """0: any free port (it stands in the lease)."""
    trace_dir: Path | None = None
    """Stage spans are appended to `<trace_dir>/<name>.jsonl`; unset: no trace files."""
    trace_sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """The part of the traces beginning at this gateway that is recorded."""
    log_level: str = "info"
    status_fd: int | None = None
    """An open descriptor for JSON lines about phases, readiness and failure: the supervisor's end of a pipe."""
    ready_file: Path | None = None
    """Touched with every renewal of a ready service's lease, and gone when it drains: what a container's health check looks at."""
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    """How long a drain may take before what is left is given back."""
    parent_death: bool = False
    """Drain when the process that started this one dies. Set by a supervisor; a shell's child lives on."""
