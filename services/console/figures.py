"""The running stack in numbers: what `top` shows, and scripts read."""

from __future__ import annotations

from typing import Any, NamedTuple

from services.console.pages import Pages
from shared.messages.fleet import WorkerLease, WorkerLoad
from shared.telemetry.scrape import quantile

TTFT, ITL = "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"


class Look(NamedTuple):
    """Everything at one moment."""

    at_s: float
    leases: list[WorkerLease]
    loads: dict[str, WorkerLoad]
    pages: Pages


def figures(before: Look, after: Look) -> dict[str, Any]:
    """Rates a second and quantiles of what happened between two looks; the rest as of the second."""
    seconds = max(after.at_s - before.at_s, 1e-3)
    was, now = before.pages.of(), after.pages.of()

    def rate(name: str, **labels: str) -> float:
        return max(now.total(name, **labels) - was.total(name, **labels), 0.0) / seconds

    def ms(histogram: str, q: float) -> float | None:
        found = quantile(was.buckets(histogram), now.buckets(histogram), q)
        return None if found is None else found * 1e3

    looked_up = rate("vllm:prefix_cache_queries_total")
    return {
        "requests_per_s": rate("slipstream_requests_total"),
        "errors_per_s": rate("slipstream_http_errors_total") + rate("slipstream_nats_refused_total"),
        "running": now.total("slipstream_decode_running"),
        "queued": now.total("slipstream_router_queued"),
        "prompt_tokens_per_s": rate("vllm:prompt_tokens_total"),
        "output_tokens_per_s": rate("vllm:generation_tokens_total"),
        "hit_rate": rate("vllm:prefix_cache_hits_total") / looked_up if looked_up else None,
        "ttft_ms": {f"p{q * 100:.0f}": ms(TTFT, q) for q in (0.5, 0.9, 0.99)},
        "itl_ms": {f"p{q * 100:.0f}": ms(ITL, q) for q in (0.5, 0.9, 0.99)},
        "decision_us": {"p50": (ms("slipstream_router_decision_seconds", 0.5) or 0.0) * 1e3 or None},
        "migrated_per_s": rate("slipstream_session_events_total", event="migrated"),
        "miss_tokens_per_s": {
            reason: (now.by("slipstream_router_miss_tokens_total", "reason")[reason] - value) / seconds
            for reason, value in was.by("slipstream_router_miss_tokens_total", "reason").items()
        },
        "tiers": {
            tier: {
                "used_bytes": used,
                "bytes": now.by("slipstream_kv_tier_bytes", "tier").get(tier, 0.0),
                "blocks": now.by("slipstream_kv_tier_blocks", "tier").get(tier, 0.0),
                "loaded_blocks_per_s": rate("slipstream_kvclient_loaded_blocks_total", tier=tier),
            }
            for tier, used in now.by("slipstream_kv_tier_used_bytes", "tier").items()
        },
        "silent": after.pages.silent,
        "services": [
            {
                "name": lease.name,
                "role": lease.role,
                "state": lease.state,
                "running": load.num_running if load else None,
                "waiting": load.num_waiting if load else None,
                "used_blocks": load.num_used_blocks if load else None,
                "blocks": load.num_blocks if load else None,
                "step_ms": load.step_ms if load else None,
                "memory_bytes": after.pages[lease.name].total("process_resident_memory_bytes"),
                "cpu_share": _cpu(before, after, lease.name, seconds),
            }
            for lease in after.leases
            for load in (after.loads.get(lease.instance),)
        ],
    }


def _cpu(before: Look, after: Look, name: str, seconds: float) -> float:
    used = after.pages[name].total("process_cpu_seconds_total") - before.pages[name].total("process_cpu_seconds_total")
    return max(used, 0.0) / seconds
