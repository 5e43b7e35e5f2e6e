"""What would end a service at its start, found before anything starts: settings are read here as the services will read them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.console.config import config_type_of
from services.console.options import UpOptions
from services.console.preflight import foreign
from services.console.topology import Place, service_specs
from services.kvstore.config import KvStoreConfig
from services.kvstore.open_store import make_policy
from shared.config import read_config
from shared.errors import ConfigError, EnvironmentFault
from shared.telemetry.logs import LEVELS

_SOMEWHERE = Path("/chosen/later")


def check_settings(options: UpOptions, environ: Mapping[str, str]) -> None:
    """ConfigError (or EnvironmentFault) for the first setting, of a flag or a variable, that a process of this stack would refuse."""
    place = Place(folder=_SOMEWHERE, nats_url=options.nats_url, kv_dir=_SOMEWHERE, num_hosts=options.hosts, cluster_secret_file=_SOMEWHERE)
    for spec in service_specs(options, place, environ, {}):
        _check(read_config(config_type_of(spec.role), spec.environ))
    level = environ.get("SS_LOG_LEVEL", "info")
    if level.lower() not in LEVELS:
        raise ConfigError("SS_LOG_LEVEL", level, f"must be one of {', '.join(LEVELS)}")


def _check(config: msgspec.Struct) -> None:
    """What the types of the fields do not tell."""
    match config:
        case KvStoreConfig():
            make_policy("SS_KV_POLICY", config.kv_policy)
            make_policy("SS_KV_SSD_POLICY", config.kv_ssd_policy)
            _check_ssd(config)
            _ = config.bind
        case _:
            pass


def _check_ssd(config: KvStoreConfig) -> None:
    """The folder is made, what is above it is not: a mistyped mount point would fill the disk that holds it.

    `slipstream up` gives each host a folder inside the one that was named.
    """
    if config.ssd is None:
        return
    folder = config.ssd[0].parent
    if not folder.parent.is_dir():
        raise ConfigError("--kv-ssd", str(folder), f"there is no folder {folder.parent}", remedy=f"mkdir -p {shlex.quote(str(folder))}")
    if folder.exists() and not folder.is_dir():
        raise ConfigError("--kv-ssd", str(folder), "is a file, not a folder")
    existing = folder if folder.is_dir() else folder.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise EnvironmentFault(foreign(existing), remedy="Name a folder that is yours: --kv-ssd PATH:SIZE")
