"""What a call leaves behind: numbers under the names that others look for, its span, its usage record, and a line if it failed."""

from __future__ import annotations

import logging

from services.gateway.admission import Admitted, Client
from services.gateway.fork import Forks
from services.gateway.generation import Generation, operation_of
from services.gateway.openai import GenerationBody
from shared.bus.base import Bus
from shared.errors import BusError, NoCapacity, SlipstreamError
from shared.messages.codec import encode
from shared.messages.fleet import UsageRecord
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.telemetry.telemetry import Attribute
from shared.types import InstanceId, Usage

log = logging.getLogger(__name__)

MAX_FORKS = 8
"""Prompts of one call that are compared with earlier ones: its first."""


class Ledger:
    """Nothing here fails a call: a record that cannot be published is counted."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry, gateway: InstanceId) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._gateway = gateway
        self._forks = Forks()

    def refused(self, body: GenerationBody, client: Client, started_ns: int, error: SlipstreamError) -> None:
        """A call that was not let in. Its model is left out: that may be anybody's text."""
        self._telemetry.span(
            operation_of(body),
            traceparent=client.caller,
            minted=client.traceparent,
            start_ns=started_ns,
            end_ns=self._telemetry.now_ns(),
            **{
                "gen_ai.provider.name": "slipstream",
                "gen_ai.operation.name": operation_of(body),
                "outcome": error.code,
                "error.type": error.code,
            },
        )

    async def ended(self, generation: Generation, client: Client, error: BaseException | None) -> None:
        """A call that was let in, whatever way it ended."""
        record = generation.record(self._gateway, error)
        told = generation.attributes(record, error)
        operation = str(told["gen_ai.operation.name"])
        self._count(record, error)
        self._measure_as_vllm(record, generation, client.traceparent)
        self._measure_as_genai(record, operation, error)
        told |= self._see_forks(generation.admitted)
        self._telemetry.span(
            f"{operation} {record.model}",
            traceparent=client.caller,
            minted=client.traceparent,
            start_ns=generation.started_ns,
            end_ns=self._telemetry.now_ns(),
            **told,
        )
        if isinstance(error, SlipstreamError) and error.status >= 500 and not isinstance(error, NoCapacity):
            log.warning("a request failed after %.0f ms: %s", record.e2e_ms, error.message, extra={"code": error.code})
        try:
            await self._bus.publish(self._subjects.usage_event(self._gateway), encode(record))
        except BusError as lost:
            self._telemetry.count("usage_dropped")
            log.info("a usage record was lost: %s", lost)

    def _count(self, record: UsageRecord, error: BaseException | None) -> None:
        telemetry, model = self._telemetry, record.model
        telemetry.count("requests", door=record.door, outcome=record.outcome or "none")
        telemetry.count("vllm:prompt_tokens", record.num_prompt_tokens, model_name=model)
        telemetry.count("vllm:generation_tokens", record.num_output_tokens, model_name=model)
        telemetry.count("vllm:prefix_cache_queries", record.num_prompt_tokens, model_name=model)
        telemetry.count("vllm:prefix_cache_hits", record.num_cached_tokens, model_name=model)
        if error is None:
            telemetry.count("vllm:request_success", finished_reason=record.outcome, model_name=model)

    def _see_forks(self, admitted: Admitted) -> dict[str, Attribute]:
        """Behind the call, where it keeps nobody waiting. Returns what its span says of them: of the first prompt that left the others."""
        model, told = admitted.model, dict[str, Attribute]()
        for request in admitted.requests[:: admitted.num_choices][:MAX_FORKS]:
            fork = self._forks.see(request, model.card.block_size, model.tokenizer.decode)
            if fork is not None:
                self._telemetry.count("prompt_fork_tokens", fork.num_tokens, place=fork.place, kind=fork.kind)
                told = told or {"diverged_at": request.num_tokens - fork.num_tokens, "diverged_kind": fork.kind}
        return told

    def _measure_as_vllm(self, record: UsageRecord, generation: Generation, trace: str) -> None:
        """Exemplars only where somebody would ask which request it was: they double the price."""

        def observe(name: str, value: float, exemplar: str = "") -> None:
            self._telemetry.observe(f"vllm:{name}", value, model_name=record.model, exemplar=exemplar)

        observe("e2e_request_latency_seconds", record.e2e_ms / 1000, trace)
        if record.ttft_ms:
            observe("time_to_first_token_seconds", record.ttft_ms / 1000, trace)
        if (itl_s := _itl_s(record)) is not None:
            observe("inter_token_latency_seconds", itl_s, trace)
            observe("request_time_per_output_token_seconds", itl_s)
        observe("request_prompt_tokens", record.num_prompt_tokens)
        observe("request_generation_tokens", record.num_output_tokens)
        observe("request_params_n", generation.admitted.num_choices)
        observe("request_params_max_tokens", generation.admitted.requests[0].sampling.max_tokens)
        usages: list[Usage] = generation.usages()
        for usage in usages:
            observe("request_queue_time_seconds", usage.queue_ms / 1000)
            observe("request_prefill_time_seconds", usage.prefill_ms / 1000)
            observe("request_decode_time_seconds", usage.decode_ms / 1000)
            observe("request_inference_time_seconds", (usage.prefill_ms + usage.decode_ms) / 1000)
        if usages:
            observe("request_max_num_generation_tokens", max(usage.num_output_tokens for usage in usages))

    def _measure_as_genai(self, record: UsageRecord, operation: str, error: BaseException | None) -> None:
        """The server metrics of OpenTelemetry's GenAI conventions, as Prometheus writes their names."""
        labels = {"gen_ai_operation_name": operation, "gen_ai_provider_name": "slipstream", "gen_ai_request_model": record.model}
        observe, error_type = self._telemetry.observe, record.outcome if error else ""
        observe("gen_ai_server_request_duration_seconds", record.e2e_ms / 1000, error_type=error_type, **labels)
        if record.ttft_ms:
            observe("gen_ai_server_time_to_first_token_seconds", record.ttft_ms / 1000, **labels)
        if (itl_s := _itl_s(record)) is not None:
            observe("gen_ai_server_time_per_output_token_seconds", itl_s, **labels)


def _itl_s(record: UsageRecord) -> float | None:
    """Mean time between the tokens of a call, in seconds; None if it had not two."""
    return (record.e2e_ms - record.ttft_ms) / 1000 / (record.num_output_tokens - 1) if record.num_output_tokens > 1 else None
