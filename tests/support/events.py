"""Events of workers, routers and gateways, as a planner hears them."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.messages.fleet import Route, UsageRecord, WorkerLoad

MODEL = "0123456789abcdef"


def make_load(worker: str = "aaaaaaaa", **fields: Any) -> WorkerLoad:
    load = WorkerLoad(
        worker=worker,
        role="decode",
        model=MODEL,
        sequence=1,
        num_running=2,
        num_waiting=1,
        num_queued_tokens=100,
        num_blocks=50,
        num_used_blocks=10,
    )
    return msgspec.structs.replace(load, **fields)


def make_route(sequence: int = 1, **fields: Any) -> Route:
    route = Route(
        router="cccccccc",
        sequence=sequence,
        request_id=f"{sequence:032x}",
        epoch=0,
        model=MODEL,
        decode_worker="aaaaaaaa",
        prefill_worker=None,
        num_tokens=100,
        num_uncached_tokens=40,
        num_blocks=8,
    )
    return msgspec.structs.replace(route, **fields)


def make_usage(number: int = 1, **fields: Any) -> UsageRecord:
    record = UsageRecord(
        request_id=f"{number:032x}",
        tenant="local",
        model="m",
        door="http",
        outcome="stop",
        num_prompt_tokens=100,
        num_output_tokens=11,
        num_cached_tokens=50,
        num_migrations=0,
        ttft_ms=100.0,
        e2e_ms=600.0,
        started_at_ns=1,
        gateway="dddddddd",
    )
    return msgspec.structs.replace(record, **fields)
