"""Where the time of a request goes: the spans that the services wrote, put side by side."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from loadtest.report import spread


class StoredSpan(msgspec.Struct, frozen=True):
    """A line of a trace file."""

    trace_id: str
    name: str
    start_ns: int
    end_ns: int
    span_id: str = ""
    parent_id: str = ""
    attributes: dict[str, Any] = {}


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, over all requests."""

    service: str
    name: str
    num: int
    starts_ms: float
    """After the request's first span began, p50."""
    p50_ms: float
    p99_ms: float
    num_blocks: int
    """KV blocks that it moved or found, of all requests."""


def read_hops(trace_dir: Path, since_ns: int) -> list[Hop]:
    """Stages of the requests that began at or after `since_ns`, in the order in which they start."""
    spans: list[tuple[str, StoredSpan]] = []
    decode = msgspec.json.Decoder(StoredSpan).decode
    for file in sorted(trace_dir.glob("*.jsonl")):
        spans += [(file.stem, decode(line)) for line in file.read_bytes().splitlines() if line]
    begins: dict[str, int] = {}
    for _, span in spans:
        begins[span.trace_id] = min(span.start_ns, begins.get(span.trace_id, span.start_ns))
    stages: defaultdict[tuple[str, str], list[StoredSpan]] = defaultdict(list)
    for service, span in spans:
        if begins[span.trace_id] >= since_ns:
            stages[service, span.name].append(span)
    hops = []
    for (service, name), members in stages.items():
        starts = spread([(span.start_ns - begins[span.trace_id]) / 1e6 for span in members])
        times = spread([(span.end_ns - span.start_ns) / 1e6 for span in members])
        num_blocks = sum(int(span.attributes.get("num_blocks", 0)) for span in members)
        hops.append(
            Hop(
                service=service,
                name=name,
                num=len(members),
                starts_ms=starts.p50,
                p50_ms=times.p50,
                p99_ms=times.p99,
                num_blocks=num_blocks,
            )
        )
    return sorted(hops, key=lambda hop: (hop.starts_ms, -hop.p50_ms))


def hop_lines(hops: list[Hop]) -> list[str]:
    """A table: when a stage starts, how long it takes."""
    rows = [("starts", "p50 ms", "p99 ms", "stage")]
    rows += [(f"{hop.starts_ms:.2f}", f"{hop.p50_ms:.2f}", f"{hop.p99_ms:.2f}", f"{hop.service}  {hop.name}") for hop in hops]
    return [f"  {start:>7} {p50:>7} {p99:>7}  {stage}" for start, p50, p99, stage in rows]
