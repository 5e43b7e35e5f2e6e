"""Who is alive: the leases of bucket ss_workers, as one process sees them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.bus.base import Bucket, Bus, Entry
from shared.bus.streams import LEASE_TTL_S
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.tasks import cancel_all
from shared.telemetry import Telemetry
from shared.types import Role

RELIST_S = 10.0
SWEEP_S = 0.25
RETRY_S = 0.5
REMEMBER_S = 60.0
"""How long an ended lease is remembered, so that a late copy of it does not bring it back."""

log = logging.getLogger(__name__)

OnChange = Callable[[WorkerLease, bool], None]
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(slots=True)
class _Seen:
    """The newest lease of an instance, and when it was heard (seconds of the link clock)."""

    lease: WorkerLease
    heard_s: float


class Fleet:
    """A reader of leases. Guarantees:

    1. An instance is alive from the first lease heard until its key is deleted or nothing new was heard for 3 s of `bus.clock`, which
       stands still while *we* are cut off. What the bucket's own TTL does is not looked at.
    2. Only a higher lease sequence counts as news: a repeated entry (re-watch, re-list, wiped bucket) neither renews nor revives.
    3. `on_change` callbacks run on the event loop, for every instance that appears (True), changes anything but its sequence (True), or
       ends (False, with its last lease).
    """

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry) -> None:
        self._bus = bus
        self._bucket_name = subjects.bucket("workers")
        self._telemetry = telemetry
        self._seen: dict[str, _Seen] = {}
        self._ended: dict[str, _Seen] = {}
        self._callbacks: list[OnChange] = []
        self._relist = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def workers(self, role: Role, model: str | None = None) -> list[WorkerLease]:
        """Those that are alive and ready, oldest first; of one model if given."""
        leases = [seen.lease for seen in self._seen.values()]
        fit = [lease for lease in leases if lease.role == role and lease.state == "ready" and model in (None, lease.model)]
        return sorted(fit, key=lambda lease: (lease.started_at_ns, lease.instance))

    def alive(self) -> list[WorkerLease]:
        """Everybody alive, in whatever state."""
        return [seen.lease for seen in self._seen.values()]

    def get(self, instance: str) -> WorkerLease | None:
        """The lease of an instance that is alive, in whatever state."""
        seen = self._seen.get(instance)
        return seen.lease if seen else None

    def is_alive(self, instance: str) -> bool:
        return instance in self._seen

    def on_change(self, callback: OnChange) -> None:
        """Call `callback(lease, is_alive)` at every change, and now for everybody alive."""
        self._callbacks.append(callback)
        for seen in list(self._seen.values()):
            callback(seen.lease, True)

    async def open(self, spawn: Spawn | None = None) -> None:
        """Read all leases, then follow them. `spawn` runs the tasks (a service's supervised one); by default plain tasks."""
        bucket = await self._bus.bucket(self._bucket_name)
        await self._list(bucket)
        self._bus.on_reconnect(self._relist.set)
        spawn = spawn or (lambda work, name: asyncio.create_task(work, name=name))
        self._tasks = [
            spawn(self._watch(bucket), "fleet-watch"),
            spawn(self._relist_often(bucket), "fleet-list"),
            spawn(self._sweep_often(), "fleet-sweep"),
        ]

    async def close(self) -> None:
        """Stop following. Idempotent."""
        tasks, self._tasks = self._tasks, []
        await cancel_all(tasks)

    async def _watch(self, bucket: Bucket) -> None:
        while True:
            try:
                async for entry in bucket.watch():
                    self._take(entry)
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the watch of %s broke off: %s", self._bucket_name, error)
            await asyncio.sleep(RETRY_S)

    async def _relist_often(self, bucket: Bucket) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_S):  # not wait_for: in Python 3.11 it may swallow a cancellation
                    await self._relist.wait()
            self._relist.clear()
            try:
                await self._list(bucket)
            except BusClosed:
                raise
            except BusError as error:  # cut off: the clock stands still, the reconnect brings the next try
                log.info("%s could not be listed: %s", self._bucket_name, error)

    async def _list(self, bucket: Bucket) -> None:
        for entry in await bucket.entries():
            self._take(entry)

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """End every lease that was not renewed in time."""
        now_s = self._bus.clock.now()
        for instance, seen in list(self._seen.items()):
            if now_s - seen.heard_s > LEASE_TTL_S:
                log.warning("%s (%s) was not heard for %g s", seen.lease.name, instance, LEASE_TTL_S)
                self._telemetry.count("fleet_expired", role=seen.lease.role)
                self._end(instance, now_s)
        for instance, seen in list(self._ended.items()):
            if now_s - seen.heard_s > REMEMBER_S:
                del self._ended[instance]

    def _take(self, entry: Entry) -> None:
        """One entry of the bucket, from the watch or a listing."""
        now_s = self._bus.clock.now()
        if entry.value is None:
            self._end(entry.key.rpartition(".")[2], now_s)
            return
        try:
            lease = decode(WorkerLease, entry.value)
        except MalformedMessage as error:  # another version's, or somebody else's
            self._telemetry.count("fleet_malformed")
            log.warning("%s in %s is no lease: %s", entry.key, self._bucket_name, error)
            return
        last = self._seen.get(lease.instance) or self._ended.get(lease.instance)
        if last is not None and lease.sequence <= last.lease.sequence:
            return
        before = self._seen.get(lease.instance)
        self._ended.pop(lease.instance, None)
        self._seen[lease.instance] = _Seen(lease, now_s)
        if before is None or _without_sequence(before.lease) != _without_sequence(lease):
            self._changed(lease, True)

    def _end(self, instance: str, now_s: float) -> None:
        seen = self._seen.pop(instance, None)
        if seen is not None:
            self._ended[instance] = _Seen(seen.lease, now_s)
            self._changed(seen.lease, False)

    def _changed(self, lease: WorkerLease, is_alive: bool) -> None:
        num_alive = sum(seen.lease.role == lease.role for seen in self._seen.values())
        self._telemetry.gauge("fleet_size", num_alive, role=lease.role)
        for callback in self._callbacks:
            callback(lease, is_alive)


def _without_sequence(lease: WorkerLease) -> WorkerLease:
    return msgspec.structs.replace(lease, sequence=0)
