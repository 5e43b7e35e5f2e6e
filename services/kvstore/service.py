"""The KV store's process: answers the host's workers, tells the routers, talks to other hosts' stores."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from services.kvstore.arrivals import Arrivals
from services.kvstore.config import KvStoreConfig, read_secret
from services.kvstore.events import KvEvents
from services.kvstore.ladder import Ladder
from services.kvstore.leading_run import LeadingRun
from services.kvstore.listener import Listener
from services.kvstore.open_store import open_store
from services.kvstore.snapshots import Snapshots
from services.kvstore.store import BlockStore
from services.kvstore.tiers.index import Block
from services.kvstore.tiers.remote import Peers
from shared.bus.base import Bus, Message, Subscription
from shared.errors import EnvironmentFault, SlipstreamError
from shared.kv.arena import StoreLock
from shared.kv.hashing import split
from shared.messages.codec import decode, encode
from shared.messages.fleet import WorkerLease
from shared.messages.kv import (
    KvAcquire,
    KvAcquireReply,
    KvCommit,
    KvCommitReply,
    KvError,
    KvLookup,
    KvLookupReply,
    KvPrefetch,
    KvRelease,
    KvReleaseReply,
    KvReserve,
    KvReserveReply,
    KvSnapshotRequest,
)
from shared.messages.subjects import KvVerb
from shared.service import Service
from shared.telemetry import Telemetry
from shared.telemetry.telemetry import Attribute
from shared.types import KEY_BYTES, HostId, InstanceId

_log = logging.getLogger(__name__)
M = TypeVar("M", bound=msgspec.Struct)

_TICK_S = 0.1
_SWEEP_S = 1.0
_EVENTS_S = 0.003
"""Changes gather for so long before they are published."""
_MODEL_GRACE_S = 60.0
"""A model that no worker has served for so long gives its DRAM back."""


class KvStoreService(Service):
    """One host's store. The arena is made (or adopted) before the lease turns ready."""

    role = "kvstore"

    def __init__(self, config: KvStoreConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self._store: BlockStore | None = None
        self._events: KvEvents
        self._ladder: Ladder
        self._leading_run: LeadingRun
        self._lock: StoreLock | None = None
        self._arrivals = Arrivals()
        self._changed = asyncio.Event()
        self._subscriptions: list[Subscription] = []
        self._listener: Listener | None = None
        self._peers: Peers | None = None
        self._unserved_since_s: dict[bytes, float] = {}
        self._own_tasks: set[asyncio.Task[None]] = set()
        """They use the arena, so they end before it is closed."""

    @property
    def store(self) -> BlockStore:
        """There from `start` on."""
        assert self._store is not None
        return self._store

    @property
    def host(self) -> HostId:
        return self.store.dram.arena.host

    def detail(self) -> str:
        """The tiers that there are, whatever was asked for."""
        if self._store is None:
            return "no memory for KV blocks"
        parts = [f"{tier.segments.num_bytes / 2**30:.1f} GiB {tier.name.upper()}" for tier in self._store.tiers]
        return " · ".join(parts + ["no SSD: see the log"] * bool(self.config.kv_ssd and not self._store.lower))

    # -- life -------------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        config = self.config
        bind, secret = config.bind, read_secret(config.cluster_secret_file) if config.cluster_secret_file else b""
        self.report(f"setting {config.kv_dram / 2**20:.0f} MiB of memory aside")
        try:
            self._lock = StoreLock(config.kv_dir)
            self._store, self._events, self._ladder = await asyncio.to_thread(open_store, config, time.monotonic, self._count)
            await self._open_doors(bind, secret)
        except EnvironmentFault as fault:
            await self.stop()
            if not config.kv_optional:
                raise
            self.telemetry.count("kv_tier_refused")
            _log.error("no KV store on this host, every worker computes what it needs: %s; %s", fault.message, fault.remedy)
        except BaseException:
            await self.stop()
            raise

    async def _open_doors(self, bind: tuple[str, int], secret: bytes) -> None:
        """Everything that others reach the store by."""
        self.store.under_way.on_arrival = self._arrivals.arrived
        self._events.on_change = self._changed.set
        self._ladder.start(self._run)
        self._leading_run = LeadingRun(self.store, self._ladder, self._arrivals)
        if secret:
            self._listener = Listener(bind, self.store, secret, self.telemetry)
            self._peers = Peers(self.store, secret, self._address_of, self._run, self.telemetry)
            self._run(self._listener.run(), "listener")
        await self._serve("lookup", KvLookup, self._lookup)
        await self._serve("reserve", KvReserve, self._reserve)
        await self._serve("commit", KvCommit, self._commit)
        await self._serve("acquire", KvAcquire, self._acquire)
        await self._serve("release", KvRelease, self._release)
        await self._serve("prefetch", KvPrefetch, self._prefetch)
        await self._serve("snapshot", KvSnapshotRequest, Snapshots(self.host, self.store, self._events).page)
        self._run(self._keep_time(), "clock")
        self._run(self._publish_events(), "events")

    async def stop(self) -> None:
        for subscription in self._subscriptions:
            await subscription.close()
        if self._listener is not None:
            await self._listener.close()
        tasks = list(self._own_tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            for tier in reversed(self._store.tiers):  # the disk writes into the arena: it ends first
                tier.close()
        if self._lock is not None:
            self._lock.close()

    def describe(self) -> WorkerLease:
        lease = super().describe()
        if self._store is None:
            return lease
        address = ""
        if self._listener is not None:
            bind_host, _ = self.config.bind
            address = f"{self.config.kv_advertise or bind_host}:{self._listener.port}"
        return msgspec.structs.replace(lease, host=self.host, kv_address=address)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self.spawn(work, name)
        self._own_tasks.add(task)
        task.add_done_callback(self._own_tasks.discard)

    async def _serve(self, verb: KvVerb, message_type: type[M], handle: Callable[[M], Awaitable[msgspec.Struct]]) -> None:
        async def answer(message: Message) -> bytes:
            try:
                return encode(await handle(decode(message_type, message.payload)))
            except SlipstreamError as error:
                self.telemetry.count("kv_refused", 1, operation=verb, reason=error.code)
                return encode(KvError(error.code, error.message))

        self._subscriptions.append(await self.bus.serve(self.subjects.kv(self.host, verb), answer))

    # -- what workers and routers ask -------------------------------------------------------------------------------------
    async def _lookup(self, message: KvLookup) -> KvLookupReply:
        return self.store.lookup(message)

    async def _reserve(self, message: KvReserve) -> KvReserveReply:
        return self.store.reserve(message)

    async def _commit(self, message: KvCommit) -> KvCommitReply:
        start_ns = self.telemetry.now_ns()
        committed = self.store.commit(message)
        self._span("kvstore commit", message.traceparent, start_ns, num_blocks=committed.num_blocks, num_to_push=len(committed.to_push))
        if committed.to_push:
            assert message.handoff_host is not None
            await self._push(message.handoff_host, committed.to_push)
        return KvCommitReply(committed.num_blocks)

    async def _push(self, host: HostId, blocks: list[Block]) -> None:
        """Announce, then send: the announcement is out before the worker learns of its commit, so no acquire can come before it."""
        if self._peers is None:
            self.telemetry.count("kv_push_blocks", len(blocks), outcome="no_secret")
            for block in blocks:
                self.store.dram.unhold(block)
            return
        keys = b"".join(block.key for block in blocks)
        model_digest = blocks[0].model_digest
        if self._peers.push(host, blocks):
            await self.bus.publish(self.subjects.kv(host, "prefetch"), encode(KvPrefetch(model_digest, keys, [self.host], True)))

    async def _acquire(self, message: KvAcquire) -> KvAcquireReply:
        held: list[Block] = []
        start_ns = self.telemetry.now_ns()
        try:
            tiers, reason = await self._leading_run.wait(message, held)
            reply = self.store.acquire(message, tiers)
            if reason and reply.reason == "cold":
                reply = msgspec.structs.replace(reply, reason=reason)
            found = {f"num_{tier}": reply.tiers.count(tier) for tier in set(reply.tiers)}
            self._span("kvstore acquire", message.traceparent, start_ns, num_blocks=len(reply.slots), reason=reply.reason, **found)
            return reply
        finally:
            for block in held:
                self.store.dram.unhold(block)

    def _span(self, name: str, traceparent: str, start_ns: int, **attributes: Attribute) -> None:
        self.telemetry.span(name, traceparent=traceparent, minted="", start_ns=start_ns, end_ns=self.telemetry.now_ns(), **attributes)

    async def _release(self, message: KvRelease) -> KvReleaseReply:
        return KvReleaseReply(self.store.release(message))

    async def _prefetch(self, message: KvPrefetch) -> KvLookupReply:
        keys = split(message.block_keys, KEY_BYTES)
        if message.under_way:
            self._announce(keys)
            return KvLookupReply(0, [])
        num_begun = self._ladder.prefetch(keys)
        missing = [key for key in keys if not any(key in tier.index.blocks for tier in self.store.tiers)]
        if missing and message.sources and self._peers is not None:
            self._run(self._peers.fetch(message.sources, message.model_digest, missing), "fetch")
        return KvLookupReply(num_begun, [])

    def _announce(self, keys: list[bytes]) -> None:
        held = self.store.dram.index.blocks
        self.store.under_way.announce(key for key in keys if key not in held)

    # -- what goes on by itself -------------------------------------------------------------------------------------------
    async def _keep_time(self) -> None:
        """Leases and pins run out; slots of dead writers come back; models that nobody serves go."""
        next_sweep_s = 0.0
        while True:
            self.store.tick()
            if time.monotonic() >= next_sweep_s:
                next_sweep_s = time.monotonic() + _SWEEP_S
                self.store.sweep()
                self._drop_unserved()
                self._gauge()
            await asyncio.sleep(_TICK_S)

    def _drop_unserved(self) -> None:
        """A model's slots are free for others once no worker has served it for a while."""
        now = time.monotonic()
        served = {lease.model for role in ("prefill", "decode") for lease in self.fleet.workers(role)}
        for model_digest in self.store.dram.models():
            if model_digest.hex()[:16] in served:
                self._unserved_since_s.pop(model_digest, None)
            elif now - self._unserved_since_s.setdefault(model_digest, now) > _MODEL_GRACE_S:
                del self._unserved_since_s[model_digest]
                num_dropped = self.store.dram.drop_model(model_digest)
                _log.info("no worker serves model %s: %d blocks dropped", model_digest.hex()[:16], num_dropped)

    def _gauge(self) -> None:
        store = self.store
        for tier in store.tiers:
            used = sum(size_class.num_used * size_class.slot_bytes for size_class in tier.segments.classes.values())
            self.telemetry.gauge("kv_tier_used_bytes", used, tier=tier.name)
            self.telemetry.gauge("kv_tier_bytes", tier.segments.num_bytes, tier=tier.name)
            self.telemetry.gauge("kv_tier_blocks", len(tier.index), tier=tier.name)
        self.telemetry.gauge("kv_leases", len(store.leases))
        self.telemetry.gauge("kv_pins", len(store.pins))
        self.telemetry.gauge("kv_expired_slots", store.dram.num_expired)

    async def _publish_events(self) -> None:
        """What changed in the last few milliseconds, in as few messages as it takes."""
        while True:
            await self._changed.wait()
            await asyncio.sleep(_EVENTS_S)
            self._changed.clear()
            self.telemetry.count("kv_evicted_blocks", self._events.take_num_evicted())
            for batch in self._events.batches():
                await self.bus.publish(self.subjects.kv_event(self.host), encode(batch))

    def _count(self, name: str, amount: int) -> None:
        if amount:
            self.telemetry.count(name, amount)

    def _address_of(self, host: HostId) -> str | None:
        """The newest: a store that was killed may still seem alive, at a port that is gone."""
        return next((lease.kv_address for lease in reversed(self.fleet.workers("kvstore")) if lease.host == host), None)
