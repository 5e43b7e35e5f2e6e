"""Making the store's parts from its settings: the arena (new, or as a killed store left it) and the tiers."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from services.kvstore.config import KvStoreConfig
from services.kvstore.events import KvEvents
from services.kvstore.ladder import Ladder
from services.kvstore.policies import POLICIES
from services.kvstore.store import BlockStore, CountFault
from services.kvstore.tiers.base import Changes, LowerTier, Quota
from services.kvstore.tiers.dram import DramTier
from services.kvstore.tiers.shares import MakePolicy
from services.kvstore.tiers.ssd import SsdTier
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


def open_store(config: KvStoreConfig, monotonic: Callable[[], float], count: CountFault) -> tuple[BlockStore, KvEvents, Ladder]:
    """The store with what it finds, the events that it will make, and what moves its blocks."""
    policy = make_policy("SS_KV_POLICY", config.kv_policy)
    quota = Quota(config.kv_model_quota, config.kv_tenant_quota)
    make_policy("SS_KV_SSD_POLICY", config.kv_ssd_policy)
    ssd = config.ssd
    arena = open_or_create(config)
    events = KvEvents(arena.host, arena.epoch)
    ladder = Ladder(events)
    dram = DramTier(arena, policy, quota, ladder)
    num_adopted = dram.adopt()
    if num_adopted:
        _log.info("%d blocks of the last epoch are held again", num_adopted)
    store = BlockStore(
        dram,
        open_lower(config, ssd, quota, ladder, monotonic, count) if ssd else [],
        monotonic=monotonic,
        is_writer_gone=lambda instance: is_writer_gone(config.kv_dir, instance),
        count=count,
    )
    ladder.attach(store)
    return store, events, ladder


def open_lower(
    config: KvStoreConfig, ssd: tuple[Path, int], quota: Quota, changes: Changes, monotonic: Callable[[], float], count: CountFault
) -> list[LowerTier]:
    """The tiers below DRAM. One that cannot be trusted or used is left out, loudly: the store serves without it."""
    folder, num_bytes = ssd
    policy = make_policy("SS_KV_SSD_POLICY", config.kv_ssd_policy)
    try:
        tier = SsdTier(folder, num_bytes, policy, quota, changes, monotonic=monotonic, count=count)
    except (EnvironmentFault, OSError) as fault:
        count("kv_tier_refused", 1)
        _log.error("no SSD tier: %s", fault)
        return []
    _log.info("the SSD tier holds %d blocks", len(tier.index))
    return [tier]
