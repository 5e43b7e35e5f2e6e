"""Settings of a decode worker."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from shared.config import ServiceConfig
from shared.engine.config import EngineConfig


class DecodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig = ServiceConfig()
    engine: EngineConfig = EngineConfig()
    kv_dir: Path | None = None
    """The host's arena; unset: no store, everything is computed here."""
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    """Sequences decoding at once (slots). Routers send at most twice as many."""
    prefill_budget: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 32
    """Prompt tokens a step computes beside decoding sequences, until a step's cost is known."""
    slo_itl_ms: Annotated[float, msgspec.Meta(gt=0, le=60_000)] = 50.0
    """Inter-token latency that prompts computed beside it must not break."""
