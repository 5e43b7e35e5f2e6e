"""Everything that a router's process holds, without its process, and the block events that come to it."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.router.decide import Decider, Decision
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.similarity import Remembered, SimilarityIndex
from services.router.sketch import SPANS, WHOLE, Sketch
from shared.messages.codec import encode
from shared.messages.fleet import WorkerLease
from shared.messages.kv import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch, KvSnapshot
from shared.messages.request import GenerateRequest
from shared.types import SamplingParams

BLOCK_SIZE = 16
CHAIN_BLOCKS = 64
"""Blocks of one cached chain: half a prompt of 2,048 tokens."""
MODEL = "0123456789abcdef"
BATCH_BLOCKS = 64
EVENT_SOURCE = "eeeeeeee"
Times = NDArray[np.float64]


class Size(NamedTuple):
    """What the router knows while it decides."""

    num_tokens: int = 2048
    num_workers: int = 64
    num_blocks: int = 100_000
    num_sketches: int = 10_000
    covered: float = 0.5
    """Share of the prompt that is cached."""


class Router:
    """With `rounds` requests to decide."""

    def __init__(self, size: Size, rounds: int) -> None:
        self.size = size
        self.random = random.Random(7)
        self.index, self.loads = PrefixIndex(), Loads()
        self.similarity = SimilarityIndex(capacity=max(size.num_sketches, 1))
        self.decider = Decider(self.index, self.loads, "auto", self.random, self.similarity)
        self.workers = [f"{number:08x}" for number in range(size.num_workers)]
        self.prefill = [f"f{number:07x}" for number in range(max(size.num_workers // 8, 1))]
        for role, names in (("decode", self.workers), ("prefill", self.prefill)):
            for number, name in enumerate(names):
                self.loads.lease(lease_of(name, role, f"{number // 8:08x}"), True)
        self.chains = self._fill()
        self._remember()
        self.requests = [self._request(number) for number in range(rounds)]

    def _fill(self) -> list[bytes]:
        """Chains over all workers' pools and hosts' DRAM, every fourth held twice."""
        length = max(int(self.size.num_tokens * self.size.covered) // BLOCK_SIZE, CHAIN_BLOCKS)
        chains = [self.random.randbytes(16 * length) for _ in range(max(self.size.num_blocks // length, 1))]
        entries: dict[str, list[BlocksStored]] = {}
        for number, chain in enumerate(chains):
            worker = number % self.size.num_workers
            entries.setdefault(self.workers[worker], []).append(BlocksStored("device", b"", chain))
            if number % 4 == 0:
                entries.setdefault(f"{worker // 8:08x}", []).append(BlocksStored("dram", b"", chain))
        for source, stored in entries.items():
            assert self.index.install(source, [KvSnapshot(source, 1, 0, stored)])
        return chains

    def _remember(self) -> None:
        """Sketches in equal parts over the spans of such prompts, near enough to nothing."""
        spans = [span for span in SPANS if span < self.size.num_tokens] + [WHOLE]
        for number in range(self.size.num_sketches):
            prompt = Remembered(self.random.choice(self.chains), self.random.choice(self.workers), None)
            sketch = Sketch(spans[number % len(spans)], self.random.getrandbits(64))
            self.similarity.add("0" * 16, MODEL, [sketch], 0, prompt)

    def _request(self, number: int) -> GenerateRequest:
        num_tokens, num_blocks = self.size.num_tokens, self.size.num_tokens // BLOCK_SIZE
        num_cached = int(num_blocks * self.size.covered)
        cached = self.random.choice(self.chains)[: 16 * num_cached]
        tokens = np.array(self.random.choices(range(49_152), k=num_tokens), dtype="<u4").tobytes()
        return GenerateRequest(
            request_id=hashlib.md5(str(number).encode()).hexdigest(),
            epoch=0,
            gateway="0" * 8,
            model=MODEL,
            request_class="normal",
            token_ids=tokens,
            num_emitted=0,
            sampling=SamplingParams(max_tokens=128),
            salt=bytes(32),
            partition="0" * 16,
            block_keys=cached + self.random.randbytes(16 * num_blocks - len(cached)),
            deadline_ms=60_000,
            sent_at_ns=0,
        )

    def decide_us(self, batches: Sequence[KvEventBatch] = ()) -> tuple[Times, Times]:
        """Time of each decision, and of the batch that was applied just before it."""
        took_us, applied_us = np.zeros(len(self.requests)), np.zeros(len(self.requests))
        waiting = iter(batches)
        for number, request in enumerate(self.requests):
            batch, begun_ns = next(waiting, None), time.perf_counter_ns()
            if batch is not None:
                self.index.apply(batch)
            applied_ns = time.perf_counter_ns()
            decision = self.decider.decide(request)
            took_us[number] = (time.perf_counter_ns() - applied_ns) / 1000
            applied_us[number] = (applied_ns - begun_ns) / 1000
            self.book(number, decision)
        self.release()
        return took_us, applied_us

    def book(self, number: int, decision: Decision | None) -> None:
        """As in life, with as many requests under way as there are workers."""
        assert decision is not None
        booking = Booking(decision.num_blocks, decision.num_decode_tokens, float(number))
        self.loads.book(self.requests[number].msg_id, decision.decode_worker, booking)
        if number >= self.size.num_workers:
            self.loads.release(self.requests[number - self.size.num_workers].msg_id)

    def release(self) -> None:
        for request in self.requests:
            self.loads.release(request.msg_id)


def lease_of(instance: str, role: str, host: str) -> WorkerLease:
    base = WorkerLease(instance, "decode", "w", "ready", 1, "0", 0, host=host, model=MODEL)
    return msgspec.structs.replace(base, role=role, max_num_seqs=64, num_blocks=65_536, block_size=BLOCK_SIZE, prefill_budget=256)


def event_batches(count: int, seed: int) -> list[bytes]:
    """As they come over the wire: blocks are stored, and those of a while ago removed."""
    generator = random.Random(seed)
    sent: list[bytes] = []
    batches: list[bytes] = []
    for sequence in range(1, count + 1):
        keys = generator.randbytes(16 * BATCH_BLOCKS)
        sent.append(keys)
        events: list[KvEvent] = [BlocksStored("dram", b"", keys)]
        if sequence > 1 and sequence % 2 == 0:
            events.append(BlocksRemoved("dram", sent[sequence // 2]))
        batches.append(encode(KvEventBatch(EVENT_SOURCE, "host", MODEL, seed, sequence, list(events))))
    return batches
