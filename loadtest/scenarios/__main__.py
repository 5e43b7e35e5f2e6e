"""python -m loadtest.scenarios [--trace FILE…] [--seeds N] [--json]

shared-prefix  150 groups of 5 requests: 6,000 shared tokens and 1,200 of their own, at the rate where random routing saturates
               (its mean work fills all workers); a fifth of the requests are the first of their group
asked-again    the same after each of them was asked once, at leisure: other questions about prefixes that somebody has
nothing-shared 750 prompts of 7,200 tokens
hot-prefix     one prefix of 2,000 tokens for all, at ten times what one worker can take
trace          with --trace: text traces (a session a file), beside what one cache of the same total size would have reused

The oracle beside them serves in order of arrival from one queue; all workers have one cache without limit, and in it a prefix as soon as
somebody begins to compute it. No router that keeps to the order of arrival does better.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from loadtest.scenarios.fleet import Outcome, Shape, Simulation
from loadtest.scenarios.oracle import oracle_reuse, oracle_ttft_s
from loadtest.scenarios.policies import POLICIES
from loadtest.scenarios.workload import Prompt, from_traces, hot_prefix, nothing_shared, shared_prefix_again

LOAD = 0.7
"""Of the capacity, where nothing is asked about saturation."""
OURS = "exact+similarity"


class Row(msgspec.Struct, frozen=True):
    """Over the seeds: the median, and the least and the most."""

    name: str
    value: float
    unit: str
    least: float = 0.0
    most: float = 0.0


def capacity(prompts: list[Prompt], shape: Shape, seed: int, policy: str = "random", warm_up: Sequence[Prompt] = ()) -> float:
    """Requests a second at which a policy's prefill queues stop being stable, from what it computes at leisure."""
    reuse = Simulation(policy, prompts, 0.5, shape, seed, warm_up).run().reuse
    mean_s = sum(prompt.num_tokens for prompt in prompts) / len(prompts) * (1 - reuse) / shape.prefill_tokens_per_s + shape.step_s
    return shape.num_workers / mean_s


def compare(prompts: list[Prompt], rate: float, shape: Shape, seed: int, warm_up: Sequence[Prompt] = ()) -> dict[str, Outcome]:
    return {policy: Simulation(policy, prompts, rate, shape, seed, warm_up).run() for policy in POLICIES}


def measure(seed: int, traces: Sequence[Path]) -> tuple[dict[str, dict[str, Outcome]], list[Row]]:
    """Every scenario by policy, and what the bars are about."""
    shape, wide = Shape(), Shape(num_workers=16)
    shared, again = shared_prefix_again(seed)
    cold, hot = nothing_shared(seed), hot_prefix(seed)
    shared_rate, again_rate = capacity(shared, shape, seed), capacity(again, shape, seed, "random", shared)
    tables = {
        "shared-prefix": compare(shared, shared_rate, shape, seed),
        "asked-again": compare(again, again_rate, shape, seed, shared),
        "nothing-shared": compare(cold, LOAD * capacity(cold, shape, seed), shape, seed),
        "hot-prefix": compare(hot, 10 * capacity(hot, Shape(num_workers=1), seed, "exact"), wide, seed),
    }
    none = tables["nothing-shared"]
    rows = [
        *how_much_better("shared", tables["shared-prefix"], oracle_ttft_s(shared, shared_rate, shape, seed)),
        *how_much_better("again", tables["asked-again"], oracle_ttft_s(again, again_rate, shape, seed, shared)),
        Row("nothing_shared_ttft_p90_ours_over_least_loaded", none[OURS].ttft_p90_s / none["least-loaded"].ttft_p90_s, "x"),
        Row("hot_prefix_max_over_mean", tables["hot-prefix"][OURS].balance, "x"),
    ]
    if traces:
        prompts = from_traces(traces)
        tables["trace"] = compare(prompts, LOAD * capacity(prompts, shape, seed), shape, seed)
        rows.append(Row("trace_reuse_over_oracle", tables["trace"][OURS].reuse / oracle_reuse(prompts, shape), "x"))
    return tables, rows


def how_much_better(name: str, table: dict[str, Outcome], oracle_s: Sequence[float]) -> list[Row]:
    """How many times as late as with ours, and as with the oracle, others give the first token."""
    bests = {"ours": table[OURS].ttft_p90_s, "oracle": float(np.percentile(oracle_s, 90))}
    return [
        Row(f"{name}_ttft_p90_{policy.replace('-', '_')}_over_{best}", table[policy].ttft_p90_s / best_s, "x")
        for policy in ("random", "least-loaded")
        for best, best_s in bests.items()
    ]


def medians(found: Sequence[list[Row]]) -> list[Row]:
    """One row for each name, of rows that every seed has."""
    rows = []
    for same in zip(*found, strict=True):
        values = [row.value for row in same]
        rows.append(Row(same[0].name, statistics.median(values), same[0].unit, min(values), max(values)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scenarios", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="arrivals and prompts drawn N times (tables: the first)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    try:
        measured = [measure(seed, options.trace) for seed in range(1, max(options.seeds, 1) + 1)]
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    tables, rows = measured[0][0], medians([rows for _, rows in measured])
    if options.json:
        print(msgspec.json.encode({"scenarios": tables, "rows": rows}).decode())
        return 0
    for name, table in tables.items():
        print(f"{name:<18}{'TTFT p50':>10}{'p90':>9}{'p99':>9}{'reuse':>9}{'balance':>9}")
        for policy, found in table.items():
            print(
                f"  {policy:<16}{found.ttft_p50_s:>9.2f}s{found.ttft_p90_s:>8.2f}s{found.ttft_p99_s:>8.2f}s"
                f"{found.reuse:>9.1%}{found.balance:>9.2f}"
            )
    print("\n".join(f"{row.name:<50}{row.value:>8.2f} {row.unit}   ({row.least:.2f} to {row.most:.2f})" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
