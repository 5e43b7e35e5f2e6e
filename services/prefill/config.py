"""Settings of a prefill worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from shared.config import ServiceConfig
from shared.engine.config import EngineConfig


class PrefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig = ServiceConfig()
    engine: EngineConfig = EngineConfig()
    kv_dir: Path | None = None
    """The host's arena. Without one there is nothing to put blocks into, and every task goes on to decode as it is."""
    chunk_ms: Annotated[float, msgspec.Meta(gt=0, le=10_000)] = 200.0
    """What a chunk may take: a cancel or a shorter prompt waits no longer."""
    chunk_tokens: Annotated[int, msgspec.Meta(ge=16, le=65_536)] = 256
    """Tokens of a chunk, until the rate is known; and twice the least of later ones."""
