"""Settings of a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from shared.config import Bytes, ServiceConfig


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig = ServiceConfig()
    http_host: str = "127.0.0.1"
    http_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    """0: any free port (it stands in the lease)."""
    keys_file: Path | None = None
    """`tenant:sha256 of the key` a line. Unset: no key is needed, and the gateway starts only on loopback or with SS_OPEN=1."""
    open: bool = False
    """Let everybody in who can reach the port."""
    cluster_secret_file: Path = Path("~/.local/state/slipstream/cluster-secret").expanduser()
    """Made once (0600) by whoever comes first; the tenants' salts come from it."""
    tokenizer_path: Path | None = None
    """Folder with tokenizer.json and tokenizer_config.json; unset: the model card's."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 600.0
    max_body: Bytes = 4 * 2**20
    read_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0
    """How long a client may take to send a request: its head, and its body."""
    write_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0
    """How long a client may take nothing of what waits for it, before its connection is closed and its request cancelled."""
    max_connections: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 8192
    """Open connections; what comes on top is closed at once."""
    max_requests: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 2048
    """Requests in work at once; more are refused with 429."""
    strict_params: bool = False
    """Refuse unknown fields instead of ignoring and listing them."""
