"""What workers tell a gateway about its requests, and what the gateway answers."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.types import Count, FinishReason, InstanceId, PackedTokens, RequestId, TokenLogprob, Usage

Stage = Literal["queued", "prefill", "handoff", "waiting", "decode"]


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one request.

    `index` counts output tokens from the first epoch on: the first token of a resubmission has index num_emitted.
    """

    request_id: RequestId
    epoch: int
    index: Count
    token_ids: Annotated[list[int], msgspec.Meta(max_length=4096)]
    logprobs: list[TokenLogprob] | None = None
    """One for each token, if asked for."""
    num_cached_tokens: Count | None = None
    """With an epoch's first token: as in `Usage`. A worker that is lost tells no Usage."""


class TokenBatch(msgspec.Struct, frozen=True, array_like=True, tag="tokens"):
    """decode worker → one gateway, core (at most once; gaps are resent). One message a step. Key: (request_id, epoch, worker, index)."""

    worker: InstanceId
    deltas: list[TokenDelta]


class HeldRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request that the sender holds."""

    request_id: RequestId
    epoch: int
    stage: Stage
    num_output_tokens: Count = 0
    """Output tokens produced so far (index of the next): shows a lost last TokenBatch."""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """router or worker → one gateway, core, every 0.5 s for everything it holds for that gateway."""

    instance: InstanceId
    role: Literal["router", "prefill", "decode"]
    held: list[HeldRequest]


class Routed(msgspec.Struct, frozen=True, array_like=True, tag="routed"):
    """router → one gateway, core, before the task is queued; only for requests that ask for it. Lost, it is missing."""

    request_id: RequestId
    epoch: int
    explanation: Annotated[str, msgspec.Meta(max_length=4096)]
    """For people, in ASCII: the way, the reason, what was found, and the candidates with features and scores."""


TokenMessage = TokenBatch | Progress | Routed
"""What travels on `ss.v1.tokens.<gateway>`."""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag="finish"):
    """worker or router → session.<gateway>.finish, request-reply, repeated until answered or the gateway's lease is gone.

    Key: (request_id, epoch, instance).
    Either `reason` (the text is complete) or `error_code` is set.
    """

    request_id: RequestId
    epoch: int
    instance: InstanceId
    reason: FinishReason | None = None
    num_output_tokens: Count = 0
    """All output tokens, those of earlier epochs included."""
    crc32: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    """zlib.crc32 of all output token ids, packed."""
    last_token_ids: PackedTokens = b""
    """The last output tokens (at most 64): a lost last TokenBatch needs no resend."""
    last_logprobs: list[TokenLogprob] | None = None
    usage: Usage = Usage()
    error_code: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """A `code` of shared.errors."""
    error_message: Annotated[str, msgspec.Meta(max_length=512)] = ""
    """Safe to show to a client: no prompt text, no paths."""
    retry_after_s: float | None = None
    decode_worker: InstanceId | None = None
    prefill_worker: InstanceId | None = None


class FinishReply(msgspec.Struct, frozen=True, array_like=True, tag="finish_reply"):
    """gateway → worker. `done`: forget the request. Else resend from `resend_from` and finish again."""

    done: bool
    resend_from: Count = 0


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """worker or router → session.<gateway>.wanted, request-reply: is this attempt still wanted? No answer = the gateway is gone = drop."""

    request_id: RequestId
    epoch: int


class WantedReply(msgspec.Struct, frozen=True, array_like=True, tag="wanted_reply"):
    """gateway → worker."""

    wanted: bool


class Resend(msgspec.Struct, frozen=True, array_like=True, tag="resend"):
    """gateway → worker.<worker>.resend, request-reply, on a gap."""

    request_id: RequestId
    epoch: int
    index: Count
    """The first output token the gateway lacks."""


class ResendReply(msgspec.Struct, frozen=True, array_like=True, tag="resend_reply"):
    """worker → gateway. `delta` None: the worker does not hold the request (any more)."""

    delta: TokenDelta | None
