"""Attention backends, by name. Adding one is one file and one line here."""

from __future__ import annotations

from shared.engine.attention.base import AttentionBackend, AttentionShape
from shared.engine.attention.reference import ReferenceAttention
from shared.engine.paged_cache import PagedKvCache
from shared.errors import ConfigError

BACKENDS: dict[str, type[AttentionBackend]] = {"reference": ReferenceAttention}

__all__ = ["BACKENDS", "AttentionBackend", "AttentionShape", "create_attention"]


def create_attention(name: str, shape: AttentionShape, cache: PagedKvCache) -> AttentionBackend:
    """`auto` takes the fastest that runs on the cache's device. Raises ConfigError for a name that this build does not have."""
    chosen = "reference" if name == "auto" else name
    if chosen not in BACKENDS:
        raise ConfigError("SS_ATTENTION", name, f"not in this version; there is: auto, {', '.join(BACKENDS)}")
    return BACKENDS[chosen](shape, cache)
