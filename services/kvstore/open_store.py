"""Making the store's parts from its settings: the arena (new, or as a killed store left it) and the tiers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable

from services.kvstore.config import KvStoreConfig
from services.kvstore.events import KvEvents
from services.kvstore.policies import POLICIES
from services.kvstore.store import BlockStore, CountFault
from services.kvstore.tiers.base import Quota
from services.kvstore.tiers.dram import DramTier
from services.kvstore.tiers.index import MakePolicy
from shared.errors import ConfigError, EnvironmentFault
from shared.kv.arena import ARENA, Arena, create_arena, open_arena
from shared.kv.slot_writer import is_writer_gone

_log = logging.getLogger(__name__)


def make_policy(variable: str, name: str) -> MakePolicy:
    """A policy by name. Raises ConfigError that lists the names."""
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(variable, name, f"no such policy; there are {', '.join(POLICIES)}")
    return policy


def open_or_create(config: KvStoreConfig) -> Arena:
    """The arena of `kv_dir`, under a new epoch. One of another size, or unreadable, is replaced (under a new host id)."""
    path = config.kv_dir / ARENA
    if path.exists() or path.is_symlink():
        try:
            arena = open_arena(config.kv_dir)
        except EnvironmentFault as fault:
            _log.warning("starting with a new arena: %s", fault)
        else:
            if arena.num_bytes == config.kv_dram:
                arena.start_epoch(arena.epoch + 1)
                return arena
            _log.warning("the arena had %d bytes, %d are configured: starting with a new one", arena.num_bytes, config.kv_dram)
            arena.close()
        path.unlink()
    arena = create_arena(config.kv_dir, config.kv_dram, secrets.token_hex(4))
    arena.start_epoch(1)
    return arena


def open_store(config: KvStoreConfig, monotonic: Callable[[], float], count: CountFault) -> tuple[BlockStore, KvEvents]:
    """The store with what it finds, and the events that it will make."""
    policy = make_policy("SS_KV_POLICY", config.kv_policy)
    arena = open_or_create(config)
    events = KvEvents(arena.host, arena.epoch)
    dram = DramTier(arena, policy, Quota(config.kv_model_quota, config.kv_tenant_quota), events)
    num_adopted = dram.adopt()
    if num_adopted:
        _log.info("%d blocks of the last epoch are held again", num_adopted)
    store = BlockStore(
        dram,
        [],
        monotonic=monotonic,
        is_writer_gone=lambda instance: is_writer_gone(config.kv_dir, instance),
        count=count,
    )
    return store, events
