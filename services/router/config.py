"""Settings of a router."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.config import ServiceConfig

Disaggregation = Literal["auto", "always", "never"]


class RouterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    service: ServiceConfig = ServiceConfig()
    disaggregation: Disaggregation = "auto"
    """auto: prefill apart when enough is left to compute and a prefill worker is better; always and never are for tests and benches."""
    max_queued: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 4096
    """Requests that wait here at most; beyond that they stay in the stream, and behind its limit they are refused with 429."""
    queue_ttl_s: Annotated[float, msgspec.Meta(gt=0, le=120)] = 60.0
    """How long a request may wait before it is refused with 429."""
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=120)] = 15.0
    """How long a request that has emitted tokens already waits for a worker of its model to come back."""
