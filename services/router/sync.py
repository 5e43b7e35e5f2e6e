"""Keeps the index true: applies KV events as they come, and fetches a snapshot of every source that is new or has a gap."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal

from services.router.index import PrefixIndex, Steps
from shared.bus.base import Bus, Subscription
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode, encode
from shared.messages.fleet import WorkerLease
from shared.messages.kv import KvEventBatch, KvSnapshot, KvSnapshotRequest
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry

PAGE_S = 2.0
RETRY_S = 0.2
MAX_PAGES = 4096
SLICE_S = 20e-6
"""Events are applied for so long at a time: a decision waits no longer for them, however many have come."""

Kind = Literal["worker", "host"]
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

log = logging.getLogger(__name__)


class IndexSync:
    """One snapshot at a time a source; sources come and go with their leases."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry, index: PrefixIndex, spawn: Spawn) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._index = index
        self._spawn = spawn
        self._kinds: dict[str, Kind] = {}
        """Sources that are alive."""
        self._fetching: set[str] = set()
        self._slice_ends_s = 0.0
        self._num_rejected = 0
        """Counted."""
        self._has_begun = asyncio.Event()

    async def follow(self, events: Subscription) -> None:
        """Apply events for ever."""
        await self._give_way()
        async for message in events:
            try:
                batch = decode(KvEventBatch, message.payload)
            except MalformedMessage as error:
                self._telemetry.count("malformed_messages", kind="kv_event")
                log.warning("a batch of KV events was dropped: %s", error)
                continue
            if batch.source in self._kinds and not await self._yielding(self._index.applying(batch)):
                self._fetch(batch.source)
            if time.perf_counter() > self._slice_ends_s:
                await self._give_way()

    async def learn(self, snapshots: Sequence[KvSnapshot]) -> None:
        """What another router knows of sources that are alive, before `begin`."""
        for source, pages in itertools.groupby(snapshots, key=lambda snapshot: snapshot.source):
            if source in self._kinds and self._index.state_of(source) != "EXACT":
                exact = await self._yielding(self._index.installing(source, list(pages)))
                self._telemetry.count("router_snapshots", outcome="learned" if exact else "gap")

    def begin(self) -> None:
        """From now on the sources themselves are asked for what is not known."""
        self._has_begun.set()

    async def _yielding(self, steps: Steps) -> bool:
        """Do the steps, and let others have their turn as soon as the slice is over."""
        while True:
            try:
                next(steps)
            except StopIteration as end:
                self._count_rejected()
                return bool(end.value)
            if time.perf_counter() > self._slice_ends_s:
                await self._give_way()

    def _count_rejected(self) -> None:
        if self._index.num_rejected > self._num_rejected:
            self._telemetry.count("router_rejected_events", self._index.num_rejected - self._num_rejected)
            self._num_rejected = self._index.num_rejected

    async def _give_way(self) -> None:
        await asyncio.sleep(0)
        self._slice_ends_s = time.perf_counter() + SLICE_S

    def lease(self, lease: WorkerLease, is_alive: bool) -> None:
        """A worker or store came or went."""
        source = lease.host if lease.role == "kvstore" else lease.instance
        if source is None or lease.role not in ("kvstore", "decode", "prefill"):
            return
        if not is_alive:
            self._kinds.pop(source, None)
            self._index.drop(source)
        elif source not in self._kinds and lease.state == "ready":
            self._kinds[source] = "host" if lease.role == "kvstore" else "worker"
            self._fetch(source)

    def _fetch(self, source: str) -> None:
        if source not in self._fetching:
            self._fetching.add(source)
            self._spawn(self._fetch_until_exact(source), "snapshot")

    async def _fetch_until_exact(self, source: str) -> None:
        try:
            await self._has_begun.wait()
            while source in self._kinds and self._index.state_of(source) != "EXACT":
                try:
                    pages = await self._pages(source)
                    if source in self._kinds and await self._yielding(self._index.installing(source, pages)):
                        self._telemetry.count("router_snapshots", outcome="exact")
                        return
                    self._telemetry.count("router_snapshots", outcome="gap")
                except BusClosed:
                    raise
                except BusError as error:
                    self._telemetry.count("router_snapshots", outcome=error.code)
                await asyncio.sleep(RETRY_S)
        finally:
            self._fetching.discard(source)

    async def _pages(self, source: str) -> list[KvSnapshot]:
        subject = self._subjects.kv(source, "snapshot") if self._kinds[source] == "host" else self._subjects.worker(source, "snapshot")
        pages: list[KvSnapshot] = []
        cursor: int | None = 0
        while cursor is not None and len(pages) < MAX_PAGES:
            reply = await self._bus.request(subject, encode(KvSnapshotRequest(cursor)), timeout_s=PAGE_S)
            pages.append(decode(KvSnapshot, reply.payload))
            cursor = pages[-1].next_cursor
        return pages
