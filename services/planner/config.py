"""Settings of the planner."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.config import ServiceConfig


class PlannerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig
    slo_ttft_ms: Annotated[float, msgspec.Meta(gt=0, le=3_600_000)] = 2000.0
    """A request meets the target if its first token came within this."""
    slo_itl_ms: Annotated[float, msgspec.Meta(gt=0, le=3_600_000)] = 100.0
    """... and if its later tokens came, on average, this close to one another."""
    plan_every_s: Annotated[float, msgspec.Meta(ge=0.05, le=3600)] = 5.0
    plan_window_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 60.0
    """How far back rates and attainment look."""
