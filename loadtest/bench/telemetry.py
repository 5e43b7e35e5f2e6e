"""`slipstream bench telemetry`: what traces cost a request, also while the collector is dead or hangs.

One stack on the simulated engine, whose own time is zero, so that nothing hides the cost: every request goes through prefill and the KV
store and leaves seven spans. Its collector is switched from block to block; a round is a block of each kind, in an order of its own:

  control    nothing is traced
  takes      a collector that takes what comes
  dead       nobody listens
  hangs      it takes connections and never answers

In a block a traced request and one that is not ("not sampled", says its traceparent) follow each other in random order, again and again:
what else the machine does falls on both. `traced_by_untraced_*` is the median of their ratios (of two untraced ones in `control`, which
says how much to believe). What the exporter does beside the requests is looked at as CPU time of all services a request, kind against
kind. Each figure is the median over the rounds, with the 95 % confidence interval that their order alone gives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import IO, Any, NamedTuple

from loadtest.client import Client
from loadtest.local_stack import LocalStack, local_stack

KINDS = ("control", "takes", "dead", "hangs")
BLOCK_S = 4.0
"""Twice a collector's time-out, so that `hangs` has its effect in every block."""
SETTLE_S = 0.7
"""After a switch, with requests that do not count: what was queued for the collector of before is gone."""
PROMPT_TOKENS = 32
WARM_UP_S = 6.0
FLAGS = ("--device", "sim", "--kv-dram", "128M")
NOT_SAMPLED = f"00-{1:032x}-{1:016x}-00"


class Row(NamedTuple):
    """One measured value."""

    name: str
    value: float
    unit: str


class Collector:
    """`loadtest.bench.collector` as a child process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        assert child.stdin and child.stdout
        self._in: IO[str] = child.stdin
        self._out: IO[str] = child.stdout
        self.url = f"http://127.0.0.1:{int(self._out.readline())}"

    def be(self, what: str) -> int:
        """How many batches have come so far."""
        self._in.write(what + "\n")
        self._in.flush()
        return int(self._out.readline().split()[1])


@contextlib.contextmanager
def _collector() -> Iterator[Collector]:
    command = [sys.executable, "-P", "-m", "loadtest.bench.collector"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Collector(child)
        finally:
            child.terminate()


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, lower, upper): the narrowest pair of order statistics that holds the true median with 95 %; all values where none does."""
    ordered = sorted(values)
    num = len(ordered)
    cover = [sum(comb(num, k) for k in range(rank + 1, num - rank)) / 2**num for rank in range(num // 2)]
    rank = max((rank for rank, share in enumerate(cover) if share >= 0.95), default=0)
    return statistics.median(ordered), ordered[rank], ordered[-1 - rank]


class Block(NamedTuple):
    """What one block measured."""

    traced_ms: list[float]
    untraced_ms: list[float]
    """The two of a pair have the same place."""
    cpu_ms: float
    """Of all services, a request."""

    @property
    def ratio(self) -> float:
        return statistics.median(one / other for one, other in zip(self.traced_ms, self.untraced_ms, strict=True))


class Load:
    """One stack and its collector."""

    def __init__(self, stack: LocalStack, collector: Collector) -> None:
        self._collector = collector
        self._pids = [pid for name, pid in stack.describe()["services"].items() if name != "nats"]
        self._rng = random.Random(52)
        self._traced = Client(stack.url)
        self._untraced = Client(stack.url, headers={"traceparent": NOT_SAMPLED})

    async def block(self, kind: str) -> Block:
        """Switch the collector, let that settle, then measure. RuntimeError if a request fails, or the collector is not as it should be."""
        num_before = self._collector.be("takes" if kind == "control" else kind)
        first = self._untraced if kind == "control" else self._traced
        await self._pairs(first, SETTLE_S)
        cpu_s = self._cpu_s()
        pairs = await self._pairs(first, BLOCK_S)
        cpu_ms = (self._cpu_s() - cpu_s) * 1e3 / (2 * len(pairs))
        num_batches = self._collector.be("takes" if kind == "control" else kind) - num_before
        if (num_batches > 0) != (kind in ("takes", "hangs")) and kind != "control":
            raise RuntimeError(f"{kind}: {num_batches} batches reached the collector")
        return Block([pair[0] for pair in pairs], [pair[1] for pair in pairs], cpu_ms)

    async def warm_up(self) -> None:
        await self._pairs(self._traced, WARM_UP_S)

    async def close(self) -> None:
        await self._traced.close()
        await self._untraced.close()

    async def _pairs(self, first: Client, seconds: float) -> list[tuple[float, float]]:
        """For so long: ms of a request of `first` and of an untraced one, in random order."""
        until_s, pairs = time.monotonic() + seconds, []
        while time.monotonic() < until_s:
            if self._rng.random() < 0.5:
                one, other = await self._request(first), await self._request(self._untraced)
            else:
                other, one = await self._request(self._untraced), await self._request(first)
            pairs.append((one, other))
        return pairs

    async def _request(self, client: Client) -> float:
        prompt = [self._rng.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)]
        body: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        outcome = await client.generate("/v1/completions", body)
        if not outcome.is_ok:
            raise RuntimeError(f"{outcome.status} {outcome.error}")
        return outcome.e2e_ms

    def _cpu_s(self) -> float:
        """What the services have used so far."""
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


async def _rounds(stack: LocalStack, collector: Collector, num_rounds: int) -> list[dict[str, Block]]:
    load, rng = Load(stack, collector), random.Random(53)
    await load.warm_up()
    rounds = [{kind: await load.block(kind) for kind in rng.sample(KINDS, len(KINDS))} for _ in range(num_rounds)]
    await load.close()
    return rounds


def compared(rounds: Sequence[Mapping[str, Block]]) -> Iterator[Row]:
    """Figures of the kinds, and kinds beside `control` and beside `takes` of the same round."""
    for kind in KINDS:
        yield Row(f"p50_{kind}", statistics.median(statistics.median(one[kind].traced_ms) for one in rounds), "ms")
    for kind in KINDS:
        yield from _with_interval(f"traced_by_untraced_{kind}", [one[kind].ratio for one in rounds])
    yield Row("cpu_control", statistics.median(one["control"].cpu_ms for one in rounds), "ms")
    # Of a block's requests half are traced: what they cost more than the others of the block is twice what the block costs more.
    yield from _with_interval("cpu_traced_by_untraced", [2 * one["takes"].cpu_ms / one["control"].cpu_ms - 1 for one in rounds])
    for kind in ("dead", "hangs"):
        yield from _with_interval(f"cpu_{kind}_by_takes", [one[kind].cpu_ms / one["takes"].cpu_ms for one in rounds])
    for kind in ("dead", "hangs"):
        medians = [statistics.median(one[kind].traced_ms) / statistics.median(one["takes"].traced_ms) for one in rounds]
        yield from _with_interval(f"p50_{kind}_by_takes", medians)


def _with_interval(name: str, values: Sequence[float]) -> Iterator[Row]:
    for suffix, value in zip(("", "_low", "_high"), median_with_interval(values), strict=True):
        yield Row(f"{name}{suffix}", value, "ratio")


def _stops(folder: Path, kind: str) -> float:
    """Seconds that a stack takes to stop after some requests, with the collector as `kind` says."""

    async def some(load: Load) -> None:
        await load.warm_up()
        await load.close()

    with _collector() as collector, local_stack(folder, *FLAGS, environ=_environ(collector)) as stack:
        collector.be(kind)
        asyncio.run(some(Load(stack, collector)))
        began_s = time.monotonic()
        stack.stop()
        return time.monotonic() - began_s


def _environ(collector: Collector) -> dict[str, str]:
    return {"SS_DISAGGREGATION": "always", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


def measure(folder: Path, num_rounds: int) -> list[Row]:
    """All rows."""
    with _collector() as collector, local_stack(folder / "switched", *FLAGS, environ=_environ(collector)) as stack:
        rows = list(compared(asyncio.run(_rounds(stack, collector, num_rounds))))
    rows += [Row(f"stop_{kind}", _stops(folder / kind, kind), "s") for kind in ("takes", "dead", "hangs")]
    return [*rows, Row("rounds", num_rounds, "count")]


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="slipstream bench telemetry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="each takes 19 s (default 20)")
    parser.add_argument("--json", action="store_true", help="rows of name, value and unit, for scripts")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        rows = measure(Path(folder), options.rounds)
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
    else:
        sys.stdout.write("".join(f"{row.name:28} {row.value:9.4f} {row.unit}\n" for row in rows))
    return 0
