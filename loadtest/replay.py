"""Replay a Mooncake-format trace through the store's own eviction policies: no model, no bytes, only blocks.

    python -m loadtest.replay --trace FILE [--capacity N …] [--policy P …] [--plain] [--plot FILE.png] [--json]

A row of the trace is a request; its `hash_ids` are its prompt's blocks, each named with its whole history. The hit rate is the share of
prompt blocks found as a leading run (what an engine can reuse), with suffixes evicted before their parents as in the store. `--plain`
counts every block for itself and lets the policy evict what it likes: comparable with general cache simulators.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from services.kvstore.policies import POLICIES
from services.kvstore.segments import SizeClass
from services.kvstore.tiers.index import Block, TierIndex

DEFAULT_CAPACITIES = (1_000, 2_000, 5_000, 10_000)
MODEL = bytes(32)


class TraceRow(msgspec.Struct):
    """A request of the trace."""

    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=2**62)]]
    timestamp: float = 0
    input_length: int = 0
    output_length: int = 0


class HitRate(msgspec.Struct, frozen=True):
    """One cell of the table."""

    policy: str
    capacity: int
    hit_rate: float


def read_trace(path: Path) -> list[TraceRow]:
    """Rows of a Mooncake-format file. Raises ValueError naming the line that is not one."""
    decoder = msgspec.json.Decoder(TraceRow)
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    rows.append(decoder.decode(line))
                except msgspec.MsgspecError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
    return rows


def replay_plain(rows: Iterable[TraceRow], policy_name: str, capacity: int) -> float:
    """Hits of single blocks by all accesses."""
    policy = POLICIES[policy_name](lambda: capacity)
    held: set[bytes] = set()
    num_hits = num_accesses = 0
    for row in rows:
        for hash_id in row.hash_ids:
            key = _digest(hash_id)
            num_accesses += 1
            if key in held:
                num_hits += 1
                policy.access(key)
                continue
            if len(held) >= capacity:
                held.remove(policy.evict(key))
            policy.admit(key)
            held.add(key)
    return num_hits / max(num_accesses, 1)


def replay_chains(rows: Iterable[TraceRow], policy_name: str, capacity: int) -> float:
    """Blocks of leading runs by all prompt blocks, through the index that the tiers use."""
    size_class = SizeClass("replay", 512, 1, capacity)
    size_class.num_slots = capacity
    index = TierIndex(POLICIES[policy_name])
    num_hits = num_blocks = 0
    for row in rows:
        chain = [_digest(hash_id) for hash_id in row.hash_ids[:capacity]]
        held = _leading_run(index, chain)
        num_hits += len(held)
        num_blocks += len(row.hash_ids)
        for block in held:
            index.hold(block)
        for block in reversed(held):
            index.touch(block)
        _store(index, size_class, chain, len(held), capacity)
        for block in held:
            index.unhold(block)
    return num_hits / max(num_blocks, 1)


def _leading_run(index: TierIndex, chain: Sequence[bytes]) -> list[Block]:
    held: list[Block] = []
    for digest in chain:
        block = index.get(digest, MODEL)
        if block is None:
            break
        held.append(block)
    return held


def _store(index: TierIndex, size_class: SizeClass, chain: Sequence[bytes], start: int, capacity: int) -> None:
    """Keep the rest of the chain, as far as room can be made without giving up the chain itself."""
    kept: list[Block] = []
    for at in range(start, len(chain)):
        digest = chain[at]
        if index.get(digest, MODEL) is not None:
            continue
        if len(index) >= capacity and not any(index.evict(share, digest[:16]) for share in list(index.shares)):
            break
        block = Block(digest, chain[at - 1] if at else MODEL, MODEL, "", size_class, 0, 0)
        index.insert(block)
        index.hold(block)
        kept.append(block)
    for block in reversed(kept):
        index.unhold(block)


def _digest(hash_id: int) -> bytes:
    return hash_id.to_bytes(16, "big") * 2


def hit_rates(rows: Sequence[TraceRow], policies: Sequence[str], capacities: Sequence[int], *, plain: bool) -> list[HitRate]:
    """The whole table, a row a policy and capacity."""
    replay = replay_plain if plain else replay_chains
    table = []
    for policy in policies:
        for capacity in capacities:
            print(f"{policy} {capacity:,} blocks…", end="\r", file=sys.stderr, flush=True)
            table.append(HitRate(policy, capacity, replay(rows, policy, capacity)))
    return table


def format_table(table: Sequence[HitRate]) -> str:
    """Policies down, capacities across; the best of each capacity is starred."""
    capacities = sorted({cell.capacity for cell in table})
    best = {size: max(cell.hit_rate for cell in table if cell.capacity == size) for size in capacities}
    lines = ["policy  " + "".join(f"{size:>11,}" for size in capacities)]
    for policy in dict.fromkeys(cell.policy for cell in table):
        rates = {cell.capacity: cell.hit_rate for cell in table if cell.policy == policy}
        lines.append(f"{policy:8}" + "".join(f"{rates[size]:>10.1%}{'*' if rates[size] == best[size] else ' '}" for size in capacities))
    return "\n".join(lines)


def plot(table: Sequence[HitRate], path: Path) -> None:
    """Hit rate over capacity, a line a policy. Needs matplotlib (extra `planner`)."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who wants a plot needs it

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", xlabel="capacity (blocks)", ylabel="hit rate", title="Hit rate by policy and capacity")
    for policy in dict.fromkeys(cell.policy for cell in table):
        cells = [cell for cell in table if cell.policy == policy]
        axes.plot([cell.capacity for cell in cells], [cell.hit_rate for cell in cells], marker="o", label=policy)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.replay", description="Hit rates of eviction policies on a block trace.")
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake-format JSON lines (hash_ids a row)")
    parser.add_argument("--capacity", type=_capacity, nargs="+", default=list(DEFAULT_CAPACITIES), help="blocks (default: %(default)s)")
    parser.add_argument("--policy", nargs="+", choices=sorted(POLICIES), default=list(POLICIES), help="default: all")
    parser.add_argument("--plain", action="store_true", help="every block for itself, without the suffix rule")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also draw the table")
    parser.add_argument("--json", action="store_true", help='print rows {"policy", "capacity", "hit_rate"}')
    return parser.parse_args(argv)


def _capacity(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of blocks")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    try:
        rows = read_trace(arguments.trace)
    except (OSError, ValueError) as error:
        print(f"✘ trace  {error}", file=sys.stderr)
        return 2
    table = hit_rates(rows, arguments.policy, arguments.capacity, plain=arguments.plain)
    if arguments.plot:
        plot(table, arguments.plot)
    if arguments.json:
        print(msgspec.json.encode(table).decode())
    else:
        print(f"{len(rows):,} requests, {sum(len(row.hash_ids) for row in rows):,} prompt blocks\n{format_table(table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
