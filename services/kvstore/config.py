"""Settings of the KV store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from shared.config import Bytes, ServiceConfig, parse_size
from shared.errors import ConfigError

_BIND = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[^:\s]+):(?P<port>\d{1,5})")

_MIN_SSD_BYTES = 2**20


class KvStoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig = ServiceConfig()
    kv_dir: Path
    """A private folder on tmpfs for the arena; one store a folder."""
    kv_dram: Bytes = 2**30
    """Bytes of the arena."""
    kv_optional: bool = False
    """Where the arena cannot be made (no room, a foreign folder): go on without a store, with one line and a count, instead of ending."""
    kv_bind: str = "127.0.0.1:0"
    """host:port of the socket for blocks between hosts; port 0: any free one (it stands in the lease)."""
    kv_advertise: str = ""
    """What other hosts call that socket's host; empty: the host of `kv_bind`."""
    cluster_secret_file: Path | None = None
    """A 0600 file that all stores share; without it no blocks travel between hosts."""
    kv_policy: str = "lru"
    """Who goes first when DRAM is full."""
    kv_ssd: str = ""
    """PATH:20G: a private folder and how much of its disk the SSD tier may take; empty: no such tier."""
    kv_ssd_policy: str = "lru"
    """Who goes first when the SSD tier is full."""
    kv_model_quota: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """The fraction of a tier that one model may take."""
    kv_tenant_quota: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    """The fraction of a tier that one tenant may take."""

    @property
    def bind(self) -> tuple[str, int]:
        """(host, port) of kv_bind. Raises ConfigError."""
        match = _BIND.fullmatch(self.kv_bind)
        if match is None or int(match["port"]) > 65535:
            raise ConfigError("SS_KV_BIND", self.kv_bind, "not host:port; write for example 127.0.0.1:0")
        return match["host"].strip("[]"), int(match["port"])

    @property
    def ssd(self) -> tuple[Path, int] | None:
        """(folder, bytes) of kv_ssd. Raises ConfigError."""
        if not self.kv_ssd:
            return None
        folder, _, size = self.kv_ssd.rpartition(":")
        try:
            num_bytes = parse_size(size)
        except ValueError as error:
            raise ConfigError("SS_KV_SSD", self.kv_ssd, "not PATH:SIZE; write for example /var/lib/slipstream:20G") from error
        if not folder or num_bytes < _MIN_SSD_BYTES:
            raise ConfigError("SS_KV_SSD", self.kv_ssd, f"needs a folder and at least {_MIN_SSD_BYTES} bytes")
        return Path(folder).expanduser(), num_bytes


def read_secret(path: Path) -> bytes:
    """The cluster secret. Raises ConfigError if the file is absent, too short, or readable by others."""
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError("SS_CLUSTER_SECRET_FILE", str(path), error.strerror or "cannot be read") from error
    if mode & 0o077:
        raise ConfigError("SS_CLUSTER_SECRET_FILE", str(path), "others can read it", remedy=f"chmod 600 {path}")
    if len(secret) < 16:
        raise ConfigError("SS_CLUSTER_SECRET_FILE", str(path), "has less than 16 bytes")
    return secret
