"""`slipstream bench stack`: what the stack itself costs, on the simulated engine whose own time is zero.

Two stacks are started one after the other: one that goes straight to decode, one that goes through prefill and the KV store.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from loadtest.arrivals import closed_loop
from loadtest.bench.hops import Hop, hop_lines, read_hops
from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack, local_stack
from loadtest.report import Spread, spread

PROMPT_TOKENS = 32
WARM_UP = 30
SETTLE_S = 6.0
"""In its first seconds a process asks the gateway about every attempt, as it may have missed cancels: not what a running stack costs."""
NUM_STREAMS = 64
FLAGS = ("--device", "sim", "--kv-dram", "128M")


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way through the stack, measured at idle: one request at a time."""

    name: str
    bar_ms: float
    ttft_ms: Spread
    hops: list[Hop]
    loaded_blocks: float
    """Blocks that decode loaded from the store, a request: shows which way was taken."""


class StackReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `bench stack` measured."""

    ways: list[Way]
    ready_s: float
    """`slipstream up` started → ready, simulated engine."""
    tokens_per_s: float
    tokens_per_s_bar: float
    tokens_per_event: float
    """Above 1: the gateway fell behind and coalesced."""


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="slipstream bench stack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=300, help="for each way, one after the other (default 300)")
    parser.add_argument("--tokens", type=int, default=1500, help=f"of each of {NUM_STREAMS} streams (default 1500)")
    parser.add_argument("--json", action="store_true", help="for scripts")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        report = measure(Path(folder), options.requests, options.tokens)
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n" if options.json else as_text(report))
    return 0


def measure(folder: Path, num_requests: int, num_tokens: int) -> StackReport:
    """Both ways, then the streams."""
    began_s = time.monotonic()
    with local_stack(folder / "direct", *FLAGS, environ={"SS_DISAGGREGATION": "never", "SS_MAX_NUM_SEQS": str(NUM_STREAMS)}) as stack:
        ready_s = time.monotonic() - began_s
        direct = uvloop.run(_measure_way(stack, "client → decode", 3.0, num_requests))
        tokens_per_s, tokens_per_event = uvloop.run(_measure_streams(stack, num_tokens))
    with local_stack(folder / "through", *FLAGS, environ={"SS_DISAGGREGATION": "always"}) as stack:
        through = uvloop.run(_measure_way(stack, "client → prefill → store → decode", 5.0, num_requests))
    return StackReport(
        ways=[direct, through], ready_s=ready_s, tokens_per_s=tokens_per_s, tokens_per_s_bar=60_000, tokens_per_event=tokens_per_event
    )


async def _measure_way(stack: LocalStack, name: str, bar_ms: float, num_requests: int) -> Way:
    client = Client(stack.url)
    model = await _model(client)
    rng = random.Random(name)
    await asyncio.sleep(SETTLE_S)
    await closed_loop(WARM_UP, 1, lambda _: client.generate("/v1/completions", _body(model, rng, 1)))
    began_ns = time.time_ns()
    outcomes = await closed_loop(num_requests, 1, lambda _: client.generate("/v1/completions", _body(model, rng, 1)))
    await client.close()
    _check(outcomes)
    hops = read_hops(stack.folder / "traces", began_ns)
    return Way(
        name=name,
        bar_ms=bar_ms,
        ttft_ms=spread([outcome.ttft_ms for outcome in outcomes]),
        hops=hops,
        loaded_blocks=next((hop.num_blocks / hop.num for hop in hops if hop.name == "decode load"), 0.0),
    )


async def _measure_streams(stack: LocalStack, num_tokens: int) -> tuple[float, float]:
    """Tokens per second to `NUM_STREAMS` streams while all of them run, and tokens an event."""
    client = Client(stack.url)
    model = await _model(client)
    rng = random.Random(0)
    outcomes = await closed_loop(NUM_STREAMS, NUM_STREAMS, lambda _: client.generate("/v1/completions", _body(model, rng, num_tokens)))
    await client.close()
    _check(outcomes)
    first_ns = min(outcome.token_times_ns[0] for outcome in outcomes)
    last_ns = max(outcome.ended_ns for outcome in outcomes)
    total = sum(outcome.num_tokens for outcome in outcomes)
    return total / ((last_ns - first_ns) / 1e9), total / sum(len(outcome.token_times_ns) for outcome in outcomes)


def _body(model: str, rng: random.Random, num_tokens: int) -> dict[str, Any]:
    """A prompt of 32 token ids that nobody has sent before."""
    return {
        "model": model,
        "prompt": [rng.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _model(client: Client) -> str:
    name: str = (await client.get("/v1/models"))["data"][0]["id"]
    return name


def _check(outcomes: Sequence[Outcome]) -> None:
    """A failed request would flatter every figure."""
    failed = [outcome for outcome in outcomes if not outcome.is_ok or not outcome.token_times_ns]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0].status} {failed[0].error or 'no text'}")


def as_text(report: StackReport) -> str:
    """For people: figure, bar, and where the time goes."""
    lines = [f"ready       {report.ready_s:.1f} s (simulated engine)", ""]
    for way in report.ways:
        ttft = way.ttft_ms
        lines.append(
            f"{way.name}: first token p50 {ttft.p50:.2f} ms (bar {way.bar_ms:g}), p99 {ttft.p99:.2f} ms, {ttft.num} requests, "
            f"{way.loaded_blocks:.2f} blocks loaded a request"
        )
        lines += [*hop_lines(way.hops), ""]
    lines.append(
        f"tokens      {report.tokens_per_s:,.0f}/s to {NUM_STREAMS} streams through one gateway (bar {report.tokens_per_s_bar:,.0f}), "
        f"{report.tokens_per_event:.1f} tokens an event"
    )
    return "\n".join(lines) + "\n"
