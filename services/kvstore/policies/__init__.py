"""Which block goes first when a tier is full. One file a policy, all under the contract of `base.py`."""

from __future__ import annotations

from services.kvstore.policies.arc import Arc
from services.kvstore.policies.base import Policy
from services.kvstore.policies.cost import Cost
from services.kvstore.policies.fifo import Fifo
from services.kvstore.policies.lfu import Lfu
from services.kvstore.policies.lru import Lru
from services.kvstore.policies.s3fifo import S3Fifo

POLICIES: dict[str, type[Policy[bytes]]] = {"lru": Lru, "lfu": Lfu, "fifo": Fifo, "s3fifo": S3Fifo, "arc": Arc, "cost": Cost}
"""By the name that the configuration uses."""
