"""Writes the dashboards: `python infra/grafana/make_dashboards.py`. A panel is a title, a unit and its queries; the rest is layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "dashboards"
RATE = "[1m]"
FIRST_TOKEN_S, PER_TOKEN_S = "2.0", "0.1"
"""What the planner aims at when it is told nothing else, as `le` has it."""
WIDTH, HEIGHT, COLUMNS = 8, 8, 3


class Panel(NamedTuple):
    """`queries`: PromQL and what its series are called."""

    title: str
    unit: str
    queries: list[tuple[str, str]]
    help: str = ""


def rate(metric: str, by: str = "", *, where: str = "") -> str:
    """Events a second; one line at 0 where nothing was counted yet."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{where}{RATE})) or on() vector(0)"


def quantiles(histogram: str, by: str = "") -> list[tuple[str, str]]:
    """p50, p90 and p99."""
    grouped = ", ".join(filter(None, ("le", by)))
    return [
        (
            f"histogram_quantile({q}, sum by ({grouped}) (rate({histogram}_bucket{RATE})))",
            f"p{q * 100:g}" + (f" {{{{{by}}}}}" if by else ""),
        )
        for q in (0.5, 0.9, 0.99)
    ]


def share(part: str, whole: str) -> str:
    return f"sum(rate({part}{RATE})) / sum(rate({whole}{RATE}))"


def within(histogram: str, bound: str) -> str:
    """The part of what came that took at most `bound`, one of the histogram's own."""
    return share(f'{histogram}_bucket{{le="{bound}"}}', f"{histogram}_count")


SLO = [
    Panel("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", quantiles("vllm:inter_token_latency_seconds"), "The mean of each request."),
    Panel("Request time", "s", quantiles("vllm:e2e_request_latency_seconds")),
    Panel(
        "Within the aim",
        "percentunit",
        [
            (within("vllm:time_to_first_token_seconds", FIRST_TOKEN_S), f"first token within {FIRST_TOKEN_S} s"),
            (within("vllm:inter_token_latency_seconds", PER_TOKEN_S), f"tokens {PER_TOKEN_S} s apart or less"),
        ],
    ),
    Panel(
        "Failed requests",
        "percentunit",
        [
            (
                share('slipstream_requests_total{outcome!~"stop|length|cancelled"}', "slipstream_requests_total") + " or on() vector(0)",
                "failed",
            )
        ],
    ),
    Panel("Requests", "reqps", [(rate("slipstream_requests_total", "door, outcome"), "{{door}} {{outcome}}")]),
    Panel(
        "Tokens",
        "tps",
        [(rate("vllm:generation_tokens_total"), "output"), (rate("vllm:prompt_tokens_total"), "prompt")],
    ),
    Panel(
        "Prompt tokens from a cache", "percentunit", [(share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"), "hits")]
    ),
    Panel("In work", "none", [("sum(vllm:num_requests_running)", "running"), ("sum(vllm:num_requests_waiting)", "waiting for a slot")]),
    Panel("Waiting for a worker", "s", quantiles("slipstream_router_queue_seconds")),
    Panel("Errors", "reqps", [(rate("slipstream_http_errors_total", "code"), "{{code}}")]),
    Panel(
        "Moved requests",
        "ops",
        [(rate("slipstream_session_events_total", "event"), "{{event}}")],
        "What sessions met besides tokens in order: resubmitted and migrated after a loss, gaps, duplicates.",
    ),
]

KV = [
    Panel("Tiers: bytes used", "bytes", [("sum by (tier) (slipstream_kv_tier_used_bytes)", "{{tier}}")]),
    Panel("Tiers: room", "bytes", [("sum by (tier) (slipstream_kv_tier_bytes)", "{{tier}}")]),
    Panel("Tiers: blocks", "none", [("sum by (tier) (slipstream_kv_tier_blocks)", "{{tier}}")]),
    Panel("Blocks loaded, by tier", "ops", [(rate("slipstream_kvclient_loaded_blocks_total", "tier"), "{{tier}}")]),
    Panel(
        "Prompt tokens the chosen worker had",
        "percentunit",
        [(share("slipstream_router_overlap_tokens_total", "slipstream_router_prompt_tokens_total"), "overlap")],
    ),
    Panel("Prompt tokens computed, by why", "tps", [(rate("slipstream_router_miss_tokens_total", "reason"), "{{reason}}")]),
    Panel("Loading blocks", "s", quantiles("slipstream_kvclient_load_seconds")),
    Panel(
        "Evicted, demoted, prefetched",
        "ops",
        [
            (rate("slipstream_kv_evicted_blocks_total"), "evicted"),
            (rate("slipstream_kv_demoted_blocks_total"), "demoted"),
            (rate("slipstream_kv_prefetched_blocks_total"), "prefetched"),
        ],
    ),
    Panel(
        "Faults, each a miss",
        "ops",
        [
            (rate("slipstream_kvclient_faults_total", "operation, reason"), "{{operation}} {{reason}}"),
            (rate("slipstream_kv_corrupt_total"), "corrupt"),
            (rate("slipstream_kv_ssd_io_faults_total"), "ssd"),
        ],
    ),
    Panel(
        "Between hosts",
        "Bps",
        [(rate("slipstream_kv_push_bytes_total"), "pushed"), (rate("slipstream_kv_pull_bytes_total"), "fetched")],
    ),
    Panel("Leases and pins", "none", [("sum(slipstream_kv_leases)", "leases"), ("sum(slipstream_kv_pins)", "pins")]),
    Panel("Handed over and not found", "ops", [(rate("slipstream_decode_handoff_misses_total", "reason"), "{{reason}}")]),
]

WORKERS = [
    Panel(
        "Sequences",
        "none",
        [
            ("sum by (instance) (slipstream_decode_running)", "{{instance}} running"),
            ("sum by (instance) (slipstream_decode_waiting)", "{{instance}} waiting"),
        ],
    ),
    Panel("Prefill tasks", "none", [("sum by (instance) (slipstream_prefill_tasks_held)", "{{instance}}")]),
    Panel("Device blocks held", "none", [("sum by (instance) (slipstream_device_used_blocks)", "{{instance}}")]),
    Panel("Decode step", "s", quantiles("slipstream_decode_step_seconds")),
    Panel("Prefill chunk", "s", quantiles("slipstream_prefill_chunk_seconds")),
    Panel(
        "Prompt tokens at prefill",
        "tps",
        [(rate("slipstream_prefill_computed_tokens_total"), "computed"), (rate("slipstream_prefill_cached_tokens_total"), "cached")],
    ),
    Panel("Requests that ended at decode", "reqps", [(rate("slipstream_decode_ended_total", "outcome"), "{{outcome}}")]),
    Panel(
        "Preempted, failed, reborn",
        "ops",
        [
            (rate("slipstream_decode_preemptions_total"), "preempted"),
            (rate("slipstream_engine_errors_total"), "failed steps"),
            (rate("slipstream_worker_reborn_total"), "reborn"),
        ],
    ),
    Panel("Memory", "bytes", [("process_resident_memory_bytes", "{{job}} {{instance}}")]),
]

BUS = [
    Panel("Processes alive", "none", [("max by (role) (slipstream_fleet_size)", "{{role}}")], "As the one that sees most sees it."),
    Panel(
        "NATS events", "ops", [(rate("slipstream_bus_events_total", "event"), "{{event}}")], "Reconnects, drops, denials: all should be 0."
    ),
    Panel("Event loop lag", "s", quantiles("slipstream_event_loop_lag_seconds")),
    Panel("Requests that wait", "none", [("sum(slipstream_router_queued)", "waiting")]),
    Panel("Routing decision", "s", quantiles("slipstream_router_decision_seconds")),
    Panel("Blocks in the index", "none", [("sum by (instance) (slipstream_router_index_blocks)", "{{instance}}")]),
    Panel("Routed, by why", "reqps", [(rate("slipstream_router_routed_total", "reason"), "{{reason}}")]),
    Panel(
        "Given up",
        "ops",
        [
            (rate("slipstream_router_refused_total", "reason"), "refused {{reason}}"),
            (rate("slipstream_router_dead_letters_total", "queue"), "dead letter {{queue}}"),
            (rate("slipstream_unwanted_attempts_total", "reason"), "unwanted {{reason}}"),
        ],
    ),
    Panel(
        "Lost leases, lost spans",
        "ops",
        [
            (rate("slipstream_leases_lost_total"), "own lease lost"),
            (rate("slipstream_fleet_expired_total", "role"), "seen to expire {{role}}"),
            (rate("slipstream_telemetry_dropped_total", "reason"), "spans dropped {{reason}}"),
        ],
    ),
]

DASHBOARDS = {"slo": ("SLO", SLO), "kv": ("KV cache", KV), "workers": ("Workers", WORKERS), "bus": ("Bus and router", BUS)}

LEGEND = {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []}
LINKS = {
    "type": "dashboards",
    "title": "Slipstream",
    "tags": ["slipstream"],
    "tooltip": "",
    "icon": "external link",
    "asDropdown": False,
    "includeVars": False,
    "keepTime": True,
    "targetBlank": False,
}
"""To each other, at the same time."""


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Grafana's JSON."""
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "uid": f"slipstream-{uid}",
        "title": f"Slipstream · {title}",
        "tags": ["slipstream"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [LINKS],
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.help,
                "datasource": source,
                "gridPos": {"x": number % COLUMNS * WIDTH, "y": number // COLUMNS * HEIGHT, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {
                    "defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}},
                    "overrides": [],
                },
                "options": {"legend": LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + index),
                        "datasource": source,
                        "expr": query,
                        "legendFormat": name,
                        "exemplar": "histogram" in query,
                    }
                    for index, (query, name) in enumerate(panel.queries)
                ],
            }
            for number, panel in enumerate(panels)
        ],
    }


def render() -> dict[str, str]:
    """File name → content."""
    return {
        f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1, ensure_ascii=False) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for name, text in render().items():
        (FOLDER / name).write_text(text)
