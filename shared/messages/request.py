"""A request on its way to the workers, and its cancellation."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.types import Count, HostId, InstanceId, ModelId, PackedTokens, RequestClass, RequestId, SamplingParams

Packed16 = Annotated[bytes, msgspec.Meta(max_length=16 * 2**16)]
"""Block keys, 16 bytes each, one after the other."""


class GenerateRequest(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """gateway → routers, by stream SS_REQUESTS (at least once). Idempotency key: (request_id, epoch)."""

    request_id: RequestId
    epoch: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    """Attempt number: 0 at first, +1 for every resubmission."""
    gateway: InstanceId
    model: ModelId
    request_class: RequestClass
    token_ids: PackedTokens
    """Prompt followed by the output tokens emitted in earlier epochs."""
    num_emitted: Count
    """How many of `token_ids`, at the end, are output of earlier epochs."""
    sampling: SamplingParams
    """With max_tokens already reduced by num_emitted."""
    salt: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    """HMAC(cluster secret, tenant ‖ cache_salt): the seed of the block chain with the model_digest."""
    partition: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """The tenant, hashed: for fair queueing and the tenant partition of similarity. Never the tenant's name."""
    block_keys: Packed16
    """16-byte keys of the full blocks of `token_ids`, for the router. Workers hash the tokens themselves."""
    deadline_ms: Annotated[int, msgspec.Meta(ge=0, le=2**40)]
    """Milliseconds left when this message was published. A holder subtracts only its own holding time."""
    sent_at_ns: int
    """Wall clock of the gateway; for traces only, never for decisions."""
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] = ""
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    """Lower first, within the class."""
    explain: bool = False
    """The caller wants to know why it is routed where it is: the router tells the gateway (`Routed`)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the original prompt, without emitted ones."""
        return self.num_tokens - self.num_emitted

    @property
    def msg_id(self) -> str:
        """Nats-Msg-Id on SS_REQUESTS; tasks append `:worker`."""
        return f"{self.request_id}:{self.epoch}"


class PrefillTask(msgspec.Struct, frozen=True, array_like=True, tag="prefill"):
    """router → one prefill worker, by stream SS_PREFILL (at least once). Idempotency key: (request_id, epoch, worker)."""

    request: GenerateRequest
    router: InstanceId
    prefill_worker: InstanceId
    decode_worker: InstanceId
    """Where the DecodeTask goes when the blocks are committed."""
    decode_host: HostId | None
    """The decode worker's host: blocks are pushed there if it is not this one. None: it has no store."""
    queue_ms: float = 0.0
    """Time the request waited in the router."""
    may_be_held: bool = True
    """False: the router knows of no block of this prompt on the worker's host, and little is to be computed: asking costs more."""


class DecodeTask(msgspec.Struct, frozen=True, array_like=True, tag="decode"):
    """prefill worker or router → one decode worker, by stream SS_DECODE (at least once). Idempotency key: (request_id, epoch, worker)."""

    request: GenerateRequest
    router: InstanceId
    decode_worker: InstanceId
    prefill_worker: InstanceId | None = None
    """Who prefilled; None: the router came straight here."""
    num_prefilled_tokens: Count = 0
    """Leading tokens whose blocks prefill committed or found (whole blocks)."""
    num_cached_tokens: Count = 0
    """Of these, tokens that prefill found in a cache and did not compute."""
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    may_be_held: bool = True
    """False: the router knows of no block of this prompt on the worker's host, and little is to be computed: asking costs more."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """gateway → all routers and workers, core fan-out (at most once; holders also ask `wanted`). Idempotent; remembered for 60 s."""

    request_id: RequestId
    epoch: int
    """Cancels every attempt up to this epoch."""
    worker: InstanceId | None = None
    """If set: only this instance's attempt of exactly this epoch."""
