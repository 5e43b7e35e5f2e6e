"""The table of instruments: the only place where a metric gets its name, its labels and its buckets.

A row's `name` is what code says: `telemetry.count("router_refused", reason="no_capacity")`. On /metrics it stands as
`slipstream_router_refused_total`; a name with a colon (`vllm:prompt_tokens`) or of the GenAI conventions (`gen_ai_...`) stands as it is.
Label values come from fixed sets or minted ids, never from users. Units are in the names: `_seconds`, `_bytes`, `_ratio`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared.types import Role

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Instrument:
    """One row. `buckets` (histograms only): upper bounds, ascending."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed_name(self) -> str:
        """As on /metrics, without the `_total` that a counter gets there."""
        is_foreign = ":" in self.name or self.name.startswith("gen_ai_")
        return self.name if is_foreign else f"slipstream_{self.name}"


SHORT_SECONDS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Work inside a process: from 10 µs to 1 s."""
REQUEST_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""What a client waits for."""
SIZE_BYTES = tuple(float(4**power) for power in range(5, 16))
"""1 KiB to 1 GiB."""
NUM_TOKENS = tuple(float(2**power) for power in range(18))
"""1 to 131,072."""

NUM_CHOICES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
GENAI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
GENAI_DURATION = tuple(0.01 * 2**power for power in range(14))
GENAI_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
GENAI_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""The buckets that the GenAI conventions ask for."""


def _counter(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, "counter", text, labels)


def _gauge(name: str, text: str, *labels: str) -> Instrument:
    return Instrument(name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Instrument:
    return Instrument(name, "histogram", text, labels, buckets)


PROCESS = (
    _gauge("service_info", "1; the labels say what this process is.", "role", "name", "instance", "version"),
    _gauge("service_state", "1 for the state that the process is in, 0 for the others.", "state"),
    _histogram("event_loop_lag_seconds", "How late a timer of the event loop fires.", SHORT_SECONDS),
    _counter("lease_renewal_failures", "Renewals of the process's own lease that failed.", "reason"),
    _counter("leases_lost", "Times the process found its own lease expired while it lived."),
    _counter("task_crashes", "Supervised tasks that ended by an exception and stopped the process."),
    _counter("telemetry_dropped", "Spans that were not kept, by cause.", "reason"),
    _counter("telemetry_label_overflow", "Values counted under the label `other`, because a label had too many values."),
    _gauge("fleet_size", "Processes whose lease is alive, as this process sees them.", "role"),
    _counter("fleet_expired", "Leases that this process saw expire.", "role"),
    _counter("fleet_malformed", "Entries of ss_workers that are no lease."),
)

BUS = (_counter("bus_events", "What the connection to NATS met with: reconnects, drops, denials, by kind.", "event"),)

GATEWAY = (
    _counter("requests", "Client calls that ended, by front door and finish reason or error code.", "door", "outcome"),
    _counter("http_errors", "HTTP replies that are errors, by code.", "code"),
    _counter("nats_refused", "Calls on the NATS door that ended in an error.", "reason"),
    _counter("session_events", "What a session met besides tokens in order.", "event"),
    _counter(
        "prompt_fork_tokens",
        "Prompt tokens behind the place where a prompt leaves the earlier ones, by what stands there.",
        "place",
        "kind",
    ),
    _counter("usage_dropped", "Usage records that could not be published."),
    _counter("vllm:prompt_tokens", "Prompt tokens of calls that ended.", "model_name"),
    _counter("vllm:generation_tokens", "Output tokens of calls that ended.", "model_name"),
    _counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", "model_name"),
    _counter("vllm:prefix_cache_hits", "Prompt tokens reused.", "model_name"),
    _counter("vllm:request_success", "Calls that ended well.", "finished_reason", "model_name"),
    _histogram("vllm:time_to_first_token_seconds", "From the call to its first token.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:inter_token_latency_seconds", "Mean time between the tokens of a call.", SHORT_SECONDS, "model_name"),
    _histogram("vllm:e2e_request_latency_seconds", "From the call to its end.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:request_queue_time_seconds", "Of that, waiting for a worker.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:request_prefill_time_seconds", "Of that, at a prefill worker.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:request_decode_time_seconds", "Of that, at the decode worker.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:request_inference_time_seconds", "The last two together.", REQUEST_SECONDS, "model_name"),
    _histogram("vllm:request_time_per_output_token_seconds", "Mean time between the tokens of a call.", SHORT_SECONDS, "model_name"),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens of a call.", NUM_TOKENS, "model_name"),
    _histogram("vllm:request_generation_tokens", "Output tokens of a call.", NUM_TOKENS, "model_name"),
    _histogram("vllm:request_max_num_generation_tokens", "Output tokens of its longest choice.", NUM_TOKENS, "model_name"),
    _histogram("vllm:request_params_max_tokens", "The limit that a call set, or was given.", NUM_TOKENS, "model_name"),
    _histogram("vllm:request_params_n", "Choices that a call asked for.", NUM_CHOICES, "model_name"),
    _histogram("gen_ai_server_request_duration_seconds", "From the call to its end.", GENAI_DURATION, *GENAI, "error_type"),
    _histogram("gen_ai_server_time_to_first_token_seconds", "From the call to its first token.", GENAI_FIRST_TOKEN, *GENAI),
    _histogram("gen_ai_server_time_per_output_token_seconds", "Mean time between the tokens of a call.", GENAI_PER_TOKEN, *GENAI),
    _gauge("vllm:num_requests_running", "Sequences in slots, by the workers' last reports.", "model_name"),
    _gauge("vllm:num_requests_waiting", "Sequences taken by a worker that wait for a slot, by the workers' last reports.", "model_name"),
    _gauge("vllm:kv_cache_usage_perc", "The part of the decode workers' device blocks in use, from 0 to 1.", "model_name"),
)

ROUTER = (
    _counter("router_routed", "Requests routed, by whether prefill was put apart and why (not).", "reason"),
    _counter("router_refused", "Requests that ended here, by error code.", "reason"),
    _counter("router_dropped", "Requests that left the queue because nobody wants them.", "reason"),
    _counter("router_requeued", "Requests whose task could not be queued at a worker.", "reason"),
    _counter("router_bad_settings", "Weights, terms or cards that made no sense; the last good ones stay.", "kind"),
    _counter("router_miss_tokens", "Prompt tokens that had to be computed, by why the first of them was not found.", "reason"),
    _counter("router_prefetches", "Hints to a store: blocks that somebody has and it lacks in memory."),
    _counter("router_similar", "Decisions by similarity: asked, and a neighbour that adds blocks was found.", "outcome"),
    _counter("router_without_kernel", "This router runs without a C compiler, on the slower references."),
    _counter("router_routes_lost", "Routes that could not be told to the other routers.", "reason"),
    _counter("router_overlap_tokens", "Prompt tokens that the chosen decode worker or its host had."),
    _counter("router_prompt_tokens", "Prompt tokens routed."),
    _counter("router_snapshots", "Snapshots fetched because a source's events had a gap or were new.", "outcome"),
    _counter("router_rejected_events", "Batches of events and snapshots that made no sense: too large, half a key, of a dead epoch."),
    _counter("router_joins", "What a router that began learned from another (alone: there was none).", "outcome"),
    _counter("router_dead_letters", "Tasks given up after too many deliveries.", "queue"),
    _gauge("router_queued", "Requests that wait."),
    _gauge("router_index_blocks", "Distinct blocks in the index."),
    _gauge("router_degraded_sources", "Sources whose events had a gap, and whose snapshot is not here yet."),
    _histogram("router_decision_seconds", "One decision.", SHORT_SECONDS),
    _histogram("router_queue_seconds", "From taken to routed.", REQUEST_SECONDS),
)

PREFILL = (
    _counter("prefill_tasks", "Prefill tasks that ended, by outcome.", "outcome"),
    _counter("prefill_computed_tokens", "Prompt tokens computed."),
    _counter("prefill_cached_tokens", "Prompt tokens found in a cache."),
    _counter("prefill_store_faults", "Tasks whose blocks could not all be given to the store; decode computes the rest.", "reason"),
    _histogram("prefill_chunk_seconds", "One chunk's forward.", SHORT_SECONDS),
    _gauge("prefill_tasks_held", "Tasks taken and not handed on."),
)

DECODE = (
    _counter("decode_ended", "Requests that ended here, by finish reason, error code or fate.", "outcome"),
    _counter("decode_handoff_misses", "Blocks that prefill handed over and decode had to compute, by reason.", "reason"),
    _counter("decode_preemptions", "Times a sequence gave up its blocks for another's and was computed again."),
    _counter("token_batches_dropped", "TokenBatches lost because the link was down; gateways ask again."),
    _counter("resends", "Requests of gateways to send tokens again."),
    _histogram("decode_step_seconds", "One step's forward.", SHORT_SECONDS),
    _gauge("decode_running", "Sequences in slots."),
    _gauge("decode_waiting", "Sequences taken and not in a slot."),
)

ENGINE = (
    _counter("engine_errors", "Steps that failed; only their own requests end."),
    _counter("malformed_messages", "Messages that are not what their subject promises, dropped.", "kind"),
    _counter("unwanted_attempts", "Requests and tasks dropped because nobody wants them, or the gateway did not answer.", "reason"),
    _counter("finish_retries", "Times a Finish was not answered and was repeated.", "reason"),
    _counter("worker_without_kernel", "This worker runs without one of its C kernels, on the slower reference.", "kernel"),
    _counter("worker_reborn", "Times the worker dropped its work and came back under a new instance id."),
    _counter("other_model_tasks", "Tasks of another model digest, computed without reuse."),
    _counter("write_back_dropped", "Full blocks that were not written back because too many waited."),
    _gauge("device_used_blocks", "Blocks of the device pool held by sequences."),
)

KVCLIENT = (
    _counter("kvclient_loaded_blocks", "Blocks copied from the arena into the device pool and verified, by the tier they lay in.", "tier"),
    _counter("kvclient_loaded_bytes", "Bytes of these blocks."),
    _counter("kvclient_stored_blocks", "Blocks newly stored."),
    _counter("kvclient_stored_bytes", "Bytes of these blocks."),
    _counter("kvclient_corrupt_blocks", "Blocks whose copy failed its check; they were dropped and computed again."),
    _counter("kvclient_faults", "Operations that ended without the store, by cause; each is a miss.", "operation", "reason"),
    _histogram("kvclient_load_seconds", "From acquire to verified blocks in the device pool.", SHORT_SECONDS),
    _histogram("kvclient_store_seconds", "From reserve to committed blocks.", SHORT_SECONDS),
)

KVSTORE = (
    _counter("kv_refused", "Requests refused with a typed error.", "operation", "reason"),
    _counter("kv_commit_refused", "Blocks whose slot did not hold what the commit said."),
    _counter("kv_lease_expired", "Leases that ran out before they were ended."),
    _counter("kv_pin_expired", "Handoff pins that ran out before the blocks were acquired."),
    _counter("kv_pin_refused", "Handoff blocks that were not pinned: pins had their quarter of the arena."),
    _counter("kv_corrupt", "Blocks dropped because a checksum, a token or a header was wrong."),
    _counter("kv_evicted_blocks", "Blocks evicted for room."),
    _counter("kv_demoted_blocks", "Blocks copied to a lower tier."),
    _counter("kv_demote_skipped", "Blocks not copied to a lower tier, because it could not keep up."),
    _counter("kv_climbed_ssd_blocks", "Blocks read from the SSD into the arena and verified."),
    _counter("kv_prefetched_blocks", "Blocks that began to climb before they were asked for."),
    _counter("kv_tier_refused", "Tiers left out at the start because their folder cannot be used or trusted."),
    _counter("kv_ssd_buffered", "1 if the SSD tier goes through the page cache, because O_DIRECT does not work there."),
    _counter("kv_ssd_full", "Times the SSD tier found no room to grow: its quota is not used up, the disk is."),
    _counter("kv_ssd_io_faults", "Reads and writes of the SSD that failed."),
    _counter("kv_ssd_deadline_faults", "Reads and writes of the SSD that took longer than their deadline."),
    _counter("kv_ssd_breaker_opened", "Times the SSD was left alone for a while after faults in a row."),
    _counter("kv_push_blocks", "Blocks to push to another host, by outcome.", "outcome"),
    _counter("kv_push_bytes", "Bytes pushed to other hosts."),
    _counter("kv_taken_blocks", "Blocks taken from other hosts' pushes."),
    _counter("kv_taken_bytes", "Bytes of these blocks."),
    _counter("kv_pull_blocks", "Blocks fetched from other hosts ahead of their use."),
    _counter("kv_pull_bytes", "Bytes of these blocks."),
    _counter("kv_peer_refused", "Connections to the socket between hosts that were refused.", "reason"),
    _gauge("kv_tier_bytes", "Room of a tier.", "tier"),
    _gauge("kv_tier_used_bytes", "Bytes of a tier's slots in use.", "tier"),
    _gauge("kv_tier_blocks", "Blocks that can be found in a tier.", "tier"),
    _gauge("kv_leases", "Live leases."),
    _gauge("kv_pins", "Blocks pinned for a handoff."),
    _gauge("kv_expired_slots", "Slots out of use until their writer is proven gone."),
)

PLANNER = (
    _counter("planner_plans", "Plans written and published."),
    _counter("planner_conflicts", "Plans given up because another planner wrote first."),
    _counter("planner_events", "Events taken.", "kind"),
    _counter("planner_malformed", "Events and plans that could not be read.", "kind"),
    _gauge("planner_missed_routes", "Route events that never came, by the gaps in their sequences."),
    _gauge("planner_workers", "Workers alive and ready, as the planner counts them.", "role"),
    _gauge("planner_observed", "What plans are based on: rates a second, shares from 0 to 1, percentiles in ms.", "what"),
)


_OF_ROLE: dict[Role, tuple[tuple[Instrument, ...], ...]] = {
    "gateway": (GATEWAY,),
    "router": (ROUTER,),
    "prefill": (PREFILL, ENGINE, KVCLIENT),
    "decode": (DECODE, ENGINE, KVCLIENT),
    "kvstore": (KVSTORE,),
    "planner": (PLANNER,),
}


def sections_of(role: Role) -> tuple[Instrument, ...]:
    """What stands on the /metrics of a role from the start. Any service may use any other row too."""
    return tuple(row for section in (PROCESS, BUS, *_OF_ROLE[role]) for row in section)


def _by_name(*sections: tuple[Instrument, ...]) -> dict[str, Instrument]:
    table: dict[str, Instrument] = {}
    for instrument in (row for section in sections for row in section):
        if instrument.name in table:
            raise ValueError(f"{instrument.name} stands in the table twice")
        table[instrument.name] = instrument
    return table


INSTRUMENTS = _by_name(PROCESS, BUS, GATEWAY, ROUTER, PREFILL, DECODE, ENGINE, KVCLIENT, KVSTORE, PLANNER)
