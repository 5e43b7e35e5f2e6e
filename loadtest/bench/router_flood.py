"""Decisions while block events stream in: one event loop for both, as in a router."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple

import numpy as np

from loadtest.bench.router_process import BATCH_BLOCKS, EVENT_SOURCE, Router, Times, event_batches
from services.router.sync import IndexSync
from shared.bus.base import Message, Subscription
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages.fleet import WorkerLease
from shared.messages.kv import KvSnapshot
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry

RARE_PER_S = 500.0
"""Decisions, where they are rare: the CPU's caches have lost what a decision touches."""
MOST_S = 1e-3
"""For one decision, where they are not, and its share of events: so many are made ready."""
BLOCKS_OF_A_BATCH = 1.5 * BATCH_BLOCKS
"""Every second one removes as many as it stores."""


class Flood(NamedTuple):
    """What came of it."""

    waited_us: Times
    """From a request's arrival to its decision."""
    blocks_per_s: float
    """Block events that were applied meanwhile."""


class Feed(Subscription):
    """Batches that come at a steady rate; what is late comes at once. An end to the loop's turn, but no sleep, where none is due."""

    def __init__(self, payloads: Sequence[bytes], batches_per_s: float) -> None:
        self._payloads = payloads
        self._gap_s = 1 / batches_per_s
        self.num_taken = 0
        self._begun_s = time.perf_counter()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        await until(self._begun_s + self.num_taken * self._gap_s)
        if self.num_taken == len(self._payloads):
            raise StopAsyncIteration
        self.num_taken += 1
        return Message("", self._payloads[self.num_taken - 1])

    async def close(self) -> None:
        self._payloads = self._payloads[: self.num_taken]


async def decide_in_flood(router: Router, blocks_per_s: float, seed: int, decisions_per_s: float | None = None) -> Flood:
    """All requests of `router`, each waiting for whatever the loop is at. None: the next comes as soon as one is decided."""
    batches_per_s, num_requests = blocks_per_s / BLOCKS_OF_A_BATCH, len(router.requests)
    most_s = num_requests / decisions_per_s * 1.2 if decisions_per_s else num_requests * MOST_S
    payloads = event_batches(int(most_s * batches_per_s), seed)
    gaps, waited_us = random.Random(seed), np.zeros(num_requests)
    sync = following_sync(router, epoch=seed)
    gc.collect()
    feed, begun_s = Feed(payloads, batches_per_s), time.perf_counter()
    following = asyncio.create_task(sync.follow(feed))
    arrival_s = begun_s
    for number, request in enumerate(router.requests):
        arrival_s = arrival_s + gaps.expovariate(decisions_per_s) if decisions_per_s else time.perf_counter()
        await asyncio.sleep(0)
        await until(arrival_s)
        decision = router.decider.decide(request)
        waited_us[number] = (time.perf_counter() - arrival_s) * 1e6
        router.book(number, decision)
    took_s = time.perf_counter() - begun_s
    following.cancel()
    await asyncio.wait([following])
    router.release()
    router.index.drop(EVENT_SOURCE)
    return Flood(waited_us, feed.num_taken * BLOCKS_OF_A_BATCH / took_s)


async def until(moment_s: float) -> None:
    """Turn after turn of the loop: its timers are too coarse."""
    while time.perf_counter() < moment_s:  # noqa: ASYNC110
        await asyncio.sleep(0)


def following_sync(router: Router, epoch: int) -> IndexSync:
    """One whose source has just begun a life, with nothing."""
    assert router.index.install(EVENT_SOURCE, [KvSnapshot(EVENT_SOURCE, epoch, 0, [])])
    sync = IndexSync(MemoryBus(MemoryBroker()), Subjects(), NullTelemetry(), router.index, spawn)
    sync.begin()
    sync.lease(WorkerLease(EVENT_SOURCE, "kvstore", "store", "ready", 1, "0", 0, host=EVENT_SOURCE), True)
    return sync


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)
