"""`slipstream bench telemetry`: what traces cost a request, and what they cost while the collector is dead or hangs.

One stack on the simulated engine, whose own time is zero, so that nothing hides the cost: every request goes through prefill and the KV
store and leaves seven spans. Its collector is switched between rounds; each round measures all four ways in an order of its own, so that
what else the machine does falls on all of them:

  untraced   the caller's traceparent says "not sampled": no span is made
  takes      a collector that takes what comes
  dead       nobody listens
  hangs      it takes connections and never answers

Ratios are taken within a round; shown is their median, with the 95 % confidence interval that their order alone gives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import comb
from pathlib import Path
from typing import IO, Any, NamedTuple

from loadtest.client import Client
from loadtest.local_stack import local_stack

WAYS = ("untraced", "takes", "dead", "hangs")
BLOCK_S = 2.0
"""One way in one round: some hundreds of requests. A collector's time-out is as long, so that `hangs` has its effect in every block."""
SETTLE_S = 0.7
"""After a switch, with requests that do not count: what was queued for the collector of before is gone."""
PROMPT_TOKENS = 32
WARM_UP_S = 6.0
FLAGS = ("--device", "sim", "--kv-dram", "128M")
NOT_SAMPLED = "00-{:032x}-00000000000000c1-00"


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


async def _requests(client: Client, seconds: float, way: str, rng: random.Random) -> list[float]:
    """One after the other for so long: milliseconds from sending to the end of each."""
    until_s, took_ms = time.monotonic() + seconds, []
    while time.monotonic() < until_s:
        prompt = [rng.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)]
        body: dict[str, Any] = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
        outcome = await client.generate("/v1/completions", body)
        if not outcome.is_ok:
            raise RuntimeError(f"{way}: {outcome.status} {outcome.error}")
        took_ms.append(outcome.e2e_ms)
    return took_ms


async def _rounds(url: str, collector: Collector, num_rounds: int) -> dict[str, list[list[float]]]:
    """Way → a list a round of what its requests took."""
    rng = random.Random(52)
    clients = {way: Client(url, headers={"traceparent": NOT_SAMPLED.format(1)} if way == "untraced" else None) for way in WAYS}
    await _requests(clients["takes"], WARM_UP_S, "takes", rng)
    took: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for _ in range(num_rounds):
        for way in rng.sample(WAYS, len(WAYS)):
            before = collector.be("takes" if way == "untraced" else way)
            await _requests(clients[way], SETTLE_S, way, rng)
            took[way].append(await _requests(clients[way], BLOCK_S, way, rng))
            after = collector.be("takes" if way == "untraced" else way)
            if (after > before) != (way in ("takes", "hangs")) and way != "untraced":
                raise RuntimeError(f"{way}: {after - before} batches reached the collector")
    for client in clients.values():
        await client.close()
    return took


def _compared(took: dict[str, list[list[float]]]) -> Iterator[Row]:
    """Medians and means of a block, each way beside the others of its round."""
    for name, middle in (("p50", statistics.median), ("mean", statistics.fmean)):
        figure = {way: [middle(block) for block in blocks] for way, blocks in took.items()}
        for way in WAYS:
            yield Row(f"{name}_{way}", statistics.median(figure[way]), "ms")
        pairs = [("takes", "untraced"), ("dead", "untraced"), ("hangs", "untraced"), ("dead", "takes"), ("hangs", "takes")]
        for way, beside in pairs:
            ratios = [one / other for one, other in zip(figure[way], figure[beside], strict=True)]
            for suffix, value in zip(("", "_low", "_high"), median_with_interval(ratios), strict=True):
                yield Row(f"{name}_{way}_by_{beside}{suffix}", value, "ratio")


def _stops(folder: Path, way: str) -> float:
    """Seconds that a stack takes to stop after some requests, with the collector as `way` says."""
    with _collector() as collector, local_stack(folder, *FLAGS, environ=_environ(collector)) as stack:
        collector.be(way)
        client_rng = random.Random(way)

        async def some() -> None:
            client = Client(stack.url)
            await _requests(client, 3.0, way, client_rng)
            await client.close()

        asyncio.run(some())
        began_s = time.monotonic()
        stack.stop()
        return time.monotonic() - began_s


def _environ(collector: Collector) -> dict[str, str]:
    return {"SS_DISAGGREGATION": "always", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


def measure(folder: Path, num_rounds: int) -> list[Row]:
    """All rows."""
    with _collector() as collector, local_stack(folder / "switched", *FLAGS, environ=_environ(collector)) as stack:
        rows = list(_compared(asyncio.run(_rounds(stack.url, collector, num_rounds))))
    rows += [Row(f"stop_{way}", _stops(folder / way, way), "s") for way in ("takes", "dead", "hangs")]
    return [*rows, Row("rounds", num_rounds, "count")]


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="slipstream bench telemetry", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20, help="each takes 11 s (default 20)")
    parser.add_argument("--json", action="store_true", help="rows of name, value and unit, for scripts")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        rows = measure(Path(folder), options.rounds)
    if options.json:
        sys.stdout.write(json.dumps([row._asdict() for row in rows]) + "\n")
    else:
        sys.stdout.write("".join(f"{row.name:28} {row.value:9.4f} {row.unit}\n" for row in rows))
    return 0
