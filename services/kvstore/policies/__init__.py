"""Which block goes first when a tier is full. One file a policy, all under the contract of `base.py`."""

from __future__ import annotations

from services.kvstore.policies.base import Policy
from services.kvstore.policies.lru import Lru

POLICIES: dict[str, type[Policy[bytes]]] = {"lru": Lru}
"""By the name that the configuration uses."""
