"""The device tier's events: which blocks a worker's own pool can be asked for."""

from __future__ import annotations

import asyncio
import time

from shared.bus.base import Bus, Message
from shared.errors import BusClosed, BusError
from shared.kv.block_pool import BlockPool, Change
from shared.messages.codec import decode, encode
from shared.messages.kv import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch, KvSnapshot, KvSnapshotRequest
from shared.messages.subjects import Subjects
from shared.types import KEY_BYTES, InstanceId, ModelId

EVERY_S = 0.02
"""Changes are gathered for so long: a step's blocks travel in one message."""
PAGE_BLOCKS = 16_384
MAX_BLOCKS = 16_384


class DeviceEvents:
    """Publishes the pool's changes with epoch and sequence, and answers snapshots. A lost batch shows as a gap."""

    def __init__(self, bus: Bus, subjects: Subjects, instance: InstanceId, model: ModelId, pool: BlockPool) -> None:
        self._bus = bus
        self._subjects = subjects
        self._instance = instance
        self._model = model
        self._pool = pool
        self._epoch = time.time_ns() // 1_000_000
        self._sequence = 0

    async def follow(self) -> None:
        """Publish for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            changes = self._pool.take_changes()
            for at in range(0, len(changes), MAX_BLOCKS):
                await self._publish(to_events(changes[at : at + MAX_BLOCKS]))

    async def _publish(self, events: list[KvEvent]) -> None:
        self._sequence += 1
        batch = KvEventBatch(self._instance, "worker", self._model, self._epoch, self._sequence, events)
        try:
            await self._bus.publish(self._subjects.kv_event(self._instance), encode(batch))
        except BusClosed:
            raise
        except BusError:  # the next batch's sequence shows the gap, and the routers fetch a snapshot
            return

    async def snapshot(self, message: Message) -> bytes:
        """Answer a KvSnapshotRequest: one page of what the pool holds. The cursor is a block's number: what stays in its block while pages
        are fetched is in one of them."""
        cursor = decode(KvSnapshotRequest, message.payload).cursor
        page = self._pool.entries(cursor, cursor + PAGE_BLOCKS)
        stored = to_events([Change(True, *entry) for entry in page])
        following = cursor + PAGE_BLOCKS if cursor + PAGE_BLOCKS < self._pool.num_blocks else None
        runs = [event for event in stored if isinstance(event, BlocksStored)]
        return encode(KvSnapshot(self._instance, self._epoch, self._sequence, runs, following))


def to_events(changes: list[Change]) -> list[KvEvent]:
    """Consecutive blocks of one chain share an event."""
    events: list[KvEvent] = []
    run: list[Change] = []
    for change in changes:
        if run and not _continues(run[-1], change):
            events.append(_event(run))
            run = []
        run.append(change)
    if run:
        events.append(_event(run))
    return events


def _continues(last: Change, change: Change) -> bool:
    return last.is_stored == change.is_stored and (not change.is_stored or change.parent == last.block_hash)


def _event(run: list[Change]) -> KvEvent:
    packed = b"".join(change.block_hash[:KEY_BYTES] for change in run)
    return BlocksStored("device", run[0].parent[:KEY_BYTES], packed) if run[0].is_stored else BlocksRemoved("device", packed)
