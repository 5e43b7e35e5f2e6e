"""Why a prompt was not found in a cache, as far as a router can know. Another tenant's blocks look cold."""

from __future__ import annotations

from typing import Literal

from services.router.decide import Decision
from services.router.index import PrefixIndex
from shared.messages.request import GenerateRequest
from shared.types import KEY_BYTES

MissReason = Literal["", "shorter_than_block", "elsewhere", "stale_index", "evicted", "diverged", "cold"]


def miss_reason(request: GenerateRequest, decision: Decision, index: PrefixIndex) -> MissReason:
    """Of the first block that the chosen worker has to compute; "": it has all that can be reused."""
    at = decision.num_overlap_blocks
    key = request.block_keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
    if not request.block_keys:
        return "shorter_than_block"
    if not key:
        return ""
    if decision.num_known_blocks > at:
        return "elsewhere"
    if index.num_degraded:
        return "stale_index"
    if index.is_gone(key):
        return "evicted"
    return "diverged" if at else "cold"
