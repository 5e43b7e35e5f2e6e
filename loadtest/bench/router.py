"""The router's decision and its index.   slipstream bench router [--json] [--rounds N] [--repeats N]

One decision is everything between the message and the choice: the leading runs of the prompt's blocks in the index, room, the similarity of
what stays uncovered, features and scores of every worker, the load window, ties, and whether prefill is put apart. Half of each prompt lies
cached at some worker or host (the `covered` rows say otherwise). Bookings are made and released between decisions, as in life. `under
events`: a batch of KV events is applied before each decision, which finds the caches of the CPU full of it. `with drain`: the time of that
batch counts too, as for a request that comes just when the router begins to apply one (it applies no more than that at a time). `in
stream`: block events come at 200,000 a second into the event loop that decides, as in a router, and a request is timed from its arrival
through whatever the loop is at; the next comes when one is decided, or (`rare in stream`) 500 a second at random times, when the CPU's
caches have lost what a decision touches.

Every shape is measured several times, and the least of each figure is taken: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from loadtest.bench.router_flood import RARE_PER_S, decide_in_flood
from loadtest.bench.router_process import BATCH_BLOCKS, Router, Size, Times, event_batches
from shared.messages.codec import decode
from shared.messages.kv import BlocksCleared, KvEventBatch

NUM_EVENT_BLOCKS = 200_000
P50_BAR_US, P99_BAR_US, EVENTS_BAR = 50.0, 150.0, 200_000.0
GROWTH_BAR = 2.0


class Row(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str


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
        flood = asyncio.run(decide_in_flood(router, EVENTS_BAR, seed))
        found |= spread("decision_in_stream", flood.waited_us) | {"decision_in_stream_events_per_s": flood.blocks_per_s}
        flood = asyncio.run(decide_in_flood(router, EVENTS_BAR, seed, RARE_PER_S))
        found |= spread("decision_rare_in_stream", flood.waited_us)
    return found


def measure(rounds: int, repeats: int) -> list[Row]:
    """The repeats of a shape lie apart in time: a machine that is busy is busy for seconds."""
    routers = {name: Router(size, rounds) for name, size in SHAPES.items()}
    least: dict[str, float] = {}
    most_events = 0.0
    gc.freeze()
    for repeat in range(1, repeats + 1):
        for name, router in routers.items():
            for figure, value in look(name, router, repeat).items():
                least[figure] = min(value, least.get(figure, math.inf))
        most_events = max(most_events, events_per_s(Router(Size(), 1), repeat))
    return [
        *(Row(figure, round(value, 1), "us" if figure.endswith("_us") else "blocks/s") for figure, value in least.items()),
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
        f"in the stream of events {found['decision_in_stream_p99_us']:.0f} of {P99_BAR_US:.0f} us, "
        f"growth {growth:.2f} of {GROWTH_BAR:.0f}x, events {found['events_per_s']:,.0f} of {EVENTS_BAR:,.0f} a second"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
