"""Context beyond the device: sessions that return after their blocks left the device pool.   slipstream bench context [--json]

The same two-turn conversations on three stacks: one whose device pool holds everything (the reference text), one whose pool holds a quarter
with the rest in DRAM, one with the rest on SSD. Every session's first turn is computed (that is the price of recomputing), then all return
one by one with a second turn. Printed: first-turn and returning time to first token, their ratio, and whether all texts are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadtest.client import Client, Outcome
from loadtest.local_stack import StackFailed, local_stack
from loadtest.report import spread

NUM_TOKENS = 8
"""Of each answer."""
BLOCK_BYTES = 737_280
"""16 tokens of SmolLM2-135M in float32."""
BAR = 3.0


class Row(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str


class Turns(msgspec.Struct):
    """What one stack answered."""

    first_ms: list[float]
    returning_ms: list[float]
    texts: list[str]
    num_cached_tokens: list[int]


def prompt_of(session: int, num_tokens: int) -> list[int]:
    """Token ids that no two sessions share a block of."""
    return [1_000 + (session * 7_919 + index * 31) % 40_000 for index in range(num_tokens)]


async def converse(url: str, num_sessions: int, num_tokens: int) -> Turns:
    """All first turns, then all second turns, one request at a time."""
    client = Client(url)
    model = (await client.get("/v1/models"))["data"][0]["id"]
    turns = Turns([], [], [], [])

    async def ask(prompt: list[int]) -> Outcome:
        body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        outcome = await client.generate("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
        if not outcome.is_ok:
            raise StackFailed(f"a request failed: {outcome.status} {outcome.error}")
        turns.texts.append(outcome.text)
        return outcome

    for session in range(num_sessions):
        turns.first_ms.append((await ask(prompt_of(session, num_tokens))).ttft_ms)
    for session in range(num_sessions):
        outcome = await ask([*prompt_of(session, num_tokens), *range(500, 520)])
        turns.returning_ms.append(outcome.ttft_ms)
        turns.num_cached_tokens.append(outcome.usage["prompt_tokens_details"]["cached_tokens"])
    await client.close()
    return turns


def run(name: str, flags: Sequence[str], pool_blocks: int, num_sessions: int, num_tokens: int, folder: Path) -> Turns:
    """One stack from start to stop."""
    print(f"{name}…", end="\r", file=sys.stderr, flush=True)
    environ = {"SS_KV_DEVICE": str(pool_blocks * BLOCK_BYTES), "SS_DISAGGREGATION": "never"}
    with local_stack(folder / name, "--numerics", "exact", "--prefill", "0", *flags, environ=environ) as stack:
        return asyncio.run(converse(stack.url, num_sessions, num_tokens))


def measure(num_sessions: int, num_tokens: int, folder: Path) -> list[Row]:
    """The three stacks, and their rows."""
    working_set = num_sessions * (num_tokens + 64) // 16
    quarter = max(working_set // 4, (num_tokens + 64) // 16 + 4)
    slab = f"{working_set * BLOCK_BYTES * 3 // 2}"
    small_arena = str(max(working_set // 8, 48) * BLOCK_BYTES)
    runs = {
        "device": run("device", ["--kv-dram", "64M"], working_set + 64, num_sessions, num_tokens, folder),
        "dram": run("dram", ["--kv-dram", str(working_set * BLOCK_BYTES * 5 // 4)], quarter, num_sessions, num_tokens, folder),
        "ssd": run("ssd", ["--kv-dram", small_arena, "--kv-ssd", f"{folder / 'slab'}:{slab}"], quarter, num_sessions, num_tokens, folder),
    }
    rows = [Row("working_set_blocks", working_set, "blocks"), Row("device_pool_blocks", quarter, "blocks")]
    for name in ("dram", "ssd"):
        turns = runs[name]
        first, returning = spread(turns.first_ms), spread(turns.returning_ms)
        cached = sum(turns.num_cached_tokens) / (num_sessions * (num_tokens + 20))
        rows += [
            Row(f"{name}_first_ttft_ms", first.p50, "ms"),
            Row(f"{name}_returning_ttft_ms", returning.p50, "ms"),
            Row(f"{name}_ttft_ratio", first.p50 / returning.p50, f"times sooner (bar {BAR:g})"),
            Row(f"{name}_cached_share", cached, "of returning prompts"),
            Row(f"{name}_same_text", float(turns.texts == runs["device"].texts), "1: as with everything in the pool"),
        ]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="slipstream bench context", description="Sessions that return after their blocks left the device."
    )
    parser.add_argument("--sessions", type=int, default=8, metavar="N")
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="of each first prompt (default %(default)s)")
    parser.add_argument("--json", action="store_true", help='print rows {"name", "value", "unit"}')
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-", dir="/var/tmp") as folder:
        try:
            rows = measure(arguments.sessions, arguments.tokens, Path(folder))
        except StackFailed as error:
            print(f"✘ context  {error}", file=sys.stderr)
            return 1
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
    else:
        for row in rows:
            print(f"  {row.name:24} {row.value:10.2f} {row.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
