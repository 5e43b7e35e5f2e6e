"""What both front doors do with a call: let it in, run it, record it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator

from services.gateway.admission import Admission, Admitted, Client
from services.gateway.generation import Door, Generation, operation_of
from services.gateway.openai import ChatBody, CompletionBody, GenerationBody
from services.gateway.sessions import Sessions
from shared.bus.base import Bus
from shared.errors import BusError, NoCapacity, Overloaded, SlipstreamError
from shared.messages.codec import encode
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.telemetry.logs import concern
from shared.types import InstanceId

log = logging.getLogger(__name__)


class Desk:
    """Limits and bookkeeping around generations."""

    def __init__(
        self, bus: Bus, subjects: Subjects, telemetry: Telemetry, gateway: InstanceId, admission: Admission, sessions: Sessions, limit: int
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._gateway = gateway
        self._sessions = sessions
        self._limit = limit
        self.admission = admission
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    async def admit(self, body: GenerationBody, client: Client) -> Admitted:
        """Raises a RequestError for whatever cannot be served. From here on, what the calling task logs carries the call's ids."""
        concern("", client.traceparent)
        started_ns = self._telemetry.now_ns()
        try:
            return await self._admit(body, client)
        except SlipstreamError as error:
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
            raise

    async def _admit(self, body: GenerationBody, client: Client) -> Admitted:
        if self.is_draining:
            raise NoCapacity("this gateway is shutting down", retry_after_s=1.0)
        if self.num_open >= self._limit:
            raise Overloaded(f"{self._limit} requests are in work already", retry_after_s=1.0)
        if isinstance(body, ChatBody):
            return await self.admission.chat(body, client)
        assert isinstance(body, CompletionBody)
        return await self.admission.completion(body, client)

    @contextlib.asynccontextmanager
    async def generation(self, admitted: Admitted, body: GenerationBody, client: Client, door: Door) -> AsyncIterator[Generation]:
        """The generation, begun; whatever way it ends it is cancelled behind us, counted and recorded."""
        concern(admitted.requests[0].request_id, client.traceparent)
        generation = Generation(admitted, body, self._sessions, door, client.tenant)
        error: BaseException | None = None
        try:
            async with generation:
                yield generation
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._record(generation, client, error)

    async def _record(self, generation: Generation, client: Client, error: BaseException | None) -> None:
        record = generation.record(self._gateway, error)
        telemetry, seconds = self._telemetry, record.e2e_ms / 1000
        telemetry.count("requests", door=record.door, outcome=record.outcome or "none")
        telemetry.count("vllm:prompt_tokens", record.num_prompt_tokens, model_name=record.model)
        telemetry.count("vllm:generation_tokens", record.num_output_tokens, model_name=record.model)
        telemetry.count("vllm:prefix_cache_queries", record.num_prompt_tokens, model_name=record.model)
        telemetry.count("vllm:prefix_cache_hits", record.num_cached_tokens, model_name=record.model)
        telemetry.observe("vllm:e2e_request_latency_seconds", seconds, model_name=record.model, exemplar=client.traceparent)
        if record.ttft_ms:
            telemetry.observe(
                "vllm:time_to_first_token_seconds", record.ttft_ms / 1000, model_name=record.model, exemplar=client.traceparent
            )
        if record.num_output_tokens > 1:
            itl_s = (record.e2e_ms - record.ttft_ms) / 1000 / (record.num_output_tokens - 1)
            telemetry.observe("vllm:inter_token_latency_seconds", itl_s, model_name=record.model)
        telemetry.observe("vllm:request_prompt_tokens", record.num_prompt_tokens, model_name=record.model)
        telemetry.observe("vllm:request_generation_tokens", record.num_output_tokens, model_name=record.model)
        for usage in generation.usages():
            telemetry.observe("vllm:request_queue_time_seconds", usage.queue_ms / 1000, model_name=record.model)
            telemetry.observe("vllm:request_prefill_time_seconds", usage.prefill_ms / 1000, model_name=record.model)
            telemetry.observe("vllm:request_decode_time_seconds", usage.decode_ms / 1000, model_name=record.model)
        if isinstance(error, SlipstreamError) and error.status >= 500 and not isinstance(error, NoCapacity):
            log.warning("a request failed after %.0f ms: %s", record.e2e_ms, error.message, extra={"code": error.code})
        if error is None:
            telemetry.count("vllm:request_success", finished_reason=record.outcome, model_name=record.model)
        told = generation.attributes(record, error)
        telemetry.span(
            f"{told['gen_ai.operation.name']} {record.model}",
            traceparent=client.caller,
            minted=client.traceparent,
            start_ns=generation.started_ns,
            end_ns=telemetry.now_ns(),
            **told,
        )
        try:
            await self._bus.publish(self._subjects.usage_event(self._gateway), encode(record))
        except BusError as lost:
            telemetry.count("usage_dropped")
            log.info("a usage record was lost: %s", lost)
