"""`slipstream bench`: the measurements of `loadtest.bench`, by name."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from services.console.usage import Parser

BENCHES = {
    "router": "a routing decision, and the index it is made from",
    "stack": "what the stack costs: first token and tokens/s, simulated engine",
    "kv": "KV store: handoff between processes, tiers",
    "context": "sessions that return after their blocks left the device pool",
    "telemetry": "what traces cost: with a collector, a dead one, one that hangs",
    "kv-accuracy": "quality of compressed KV blocks on real text",
}


def run(argv: Sequence[str]) -> int:
    """The command: `bench NAME …` is `loadtest.bench.NAME.main(…)`, which returns the exit code."""
    width = max(map(len, BENCHES))
    parser = Parser(
        prog="slipstream bench",
        usage="slipstream bench NAME [options]    (bench NAME --help tells more)",
        epilog="benches:\n" + "\n".join(f"  {name:<{width}}  {summary}" for name, summary in BENCHES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHES, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv[:1])
    code: int = importlib.import_module(f"loadtest.bench.{parsed.name.replace('-', '_')}").main(list(argv[1:]))
    return code
