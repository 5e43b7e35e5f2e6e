"""The router's decision and its index.   slipstream bench router [--json] [--rounds N] [--repeats N]

One decision is everything between the message and the choice: the leading runs of the prompt's blocks in the index, room, the similarity of
what stays uncovered, features and scores of every worker, the load window, ties, and whether prefill is put apart. Half of each prompt lies
cached at some worker or host (the `covered` rows say otherwise). Bookings are made and released between decisions, as in life. `under
events`: a batch of KV events is applied before each decision, which finds the caches of the CPU full of it. `with drain`: the time of that
batch counts too, as for a request that comes just when the router begins to apply one (it applies no more than that at a time).

Every shape is measured several times, and the least of each figure is taken: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.router.decide import Decider
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.similarity import Remembered, SimilarityIndex
from services.router.sketch import SPANS, WHOLE, Sketch
from shared.messages.codec import decode, encode
from shared.messages.fleet import WorkerLease
from shared.messages.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEventBatch, KvSnapshot
from shared.messages.request import GenerateRequest
from shared.types import SamplingParams

BLOCK_SIZE = 16
CHAIN_BLOCKS = 64
"""Blocks of one cached chain: half a prompt of 2,048 tokens."""
MODEL = "0123456789abcdef"
BATCH_BLOCKS = 64
NUM_EVENT_BLOCKS = 200_000
Times = NDArray[np.float64]
P50_BAR_US, P99_BAR_US, EVENTS_BAR = 50.0, 150.0, 200_000.0
GROWTH_BAR = 2.0


class Row(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str


class Size(NamedTuple):
    """What the router knows while it decides."""

    num_tokens: int = 2048
    num_workers: int = 64
    num_blocks: int = 100_000
    num_sketches: int = 10_000
    covered: float = 0.5
    """Share of the prompt that is cached."""


class Router:
    """Everything a router's process holds, without its process."""

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
            assert decision is not None
            self.loads.book(request.msg_id, decision.decode_worker, Booking(decision.num_blocks, decision.num_decode_tokens, float(number)))
            if number >= self.size.num_workers:
                self.loads.release(self.requests[number - self.size.num_workers].msg_id)
        for request in self.requests:
            self.loads.release(request.msg_id)
        return took_us, applied_us


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
        batches.append(encode(KvEventBatch("eeeeeeee", "host", MODEL, seed, sequence, list(events))))
    return batches


def events_per_s(router: Router, seed: int) -> float:
    """Block events from bytes to index."""
    payloads = event_batches(NUM_EVENT_BLOCKS // BATCH_BLOCKS, seed)
    begun = time.perf_counter()
    num_blocks = 0
    for payload in payloads:
        batch = decode(KvEventBatch, payload)
        router.index.apply(batch)
        num_blocks += sum(len(event.block_keys) // 16 for event in batch.events if not isinstance(event, BlocksCleared))
    return num_blocks / (time.perf_counter() - begun)


def spread(name: str, took_us: Times) -> dict[str, float]:
    return {f"{name}_p{percent}_us": float(np.percentile(took_us, percent)) for percent in (50, 99)}


SHAPES: dict[str, Size] = {
    "decision": Size(),
    "decision_1m": Size(num_workers=512, num_blocks=1_000_000),
    "decision_512_tokens": Size(num_tokens=512),
    "decision_8k_tokens": Size(num_tokens=8192),
    "decision_8_workers": Size(num_workers=8),
    "decision_no_sketches": Size(num_sketches=0),
    "decision_100k_sketches": Size(num_sketches=100_000),
    "decision_cold": Size(covered=0.0),
    "decision_covered": Size(covered=1.0),
}


def look(name: str, router: Router, seed: int) -> dict[str, float]:
    """One run of a shape, everything warm."""
    router.decide_us()
    gc.collect()
    found = spread(name, router.decide_us()[0])
    if name == "decision":
        batches = [decode(KvEventBatch, payload) for payload in event_batches(len(router.requests), seed)]
        gc.collect()
        took_us, applied_us = router.decide_us(batches)
        found |= spread("decision_under_events", took_us) | spread("decision_with_drain", took_us + applied_us)
    return found


def measure(rounds: int, repeats: int) -> list[Row]:
    """The repeats of a shape lie apart in time: a machine that is busy is busy for seconds."""
    routers = {name: Router(size, rounds) for name, size in SHAPES.items()}
    least: dict[str, float] = {}
    most_events = 0.0
    gc.freeze()
    for repeat in range(1, repeats + 1):
        for name, router in routers.items():
            for figure, value_us in look(name, router, repeat).items():
                least[figure] = min(value_us, least.get(figure, math.inf))
        most_events = max(most_events, events_per_s(Router(Size(), 1), repeat))
    return [
        *(Row(figure, round(value_us, 1), "us") for figure, value_us in least.items()),
        Row("events_per_s", round(most_events), "blocks/s"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="slipstream bench router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=2000, help="decisions of each shape")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each shape")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = measure(options.rounds, options.repeats)
    found = {row.name: row.value for row in rows}
    growth = found["decision_1m_p50_us"] / found["decision_p50_us"]
    rows.append(Row("growth", round(growth, 2), "x"))
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    for row in rows:
        print(f"{row.name:<34}{row.value:>14,.1f} {row.unit}")
    print(
        f"bars: p50 {found['decision_p50_us']:.0f} of {P50_BAR_US:.0f} us, p99 {found['decision_p99_us']:.0f} and "
        f"with drain {found['decision_with_drain_p99_us']:.0f} of {P99_BAR_US:.0f} us, "
        f"growth {growth:.2f} of {GROWTH_BAR:.0f}x, events {found['events_per_s']:,.0f} of {EVENTS_BAR:,.0f} a second"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
