"""Plain data shared by messages and engine. Knows no library but msgspec."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec

Role = Literal["gateway", "router", "prefill", "decode", "kvstore", "planner"]
RequestClass = Literal["high", "normal", "batch"]
Tier = Literal["device", "dram", "ssd", "remote"]
Numerics = Literal["default", "exact"]
FinishReason = Literal["stop", "length", "cancelled"]

RequestId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
"""A request: 32 hex digits (UUIDv7), minted by the gateway, never user text."""

InstanceId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
"""A process start: 8 hex digits, new each time a process starts. A worker, a gateway and a router are each an instance."""

HostId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
"""An arena: 8 hex digits kept in the arena's header, never the hostname."""

ModelId = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
"""The first 16 hex digits of a model_digest."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
"""A number of tokens, blocks, requests or bytes."""

PackedTokens = Annotated[bytes, msgspec.Meta(max_length=4 * 2**20)]
"""Token ids as little-endian uint32, 4 bytes each. Token ids travel packed: a list of ints costs ten times as much to decode."""

KEY_BYTES = 16
"""Block hashes are cut to 16 bytes (128 bit) in indexes and messages; stored blocks keep all 32."""


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids → little-endian uint32 bytes."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    """Little-endian uint32 bytes → token ids. A length that is no multiple of 4 raises ValueError."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the next token is chosen. Ranges are those of the OpenAI API and vLLM; the types refuse everything else."""

    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 16
    """Output tokens still to generate (a resubmission reduces it by what was emitted)."""
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0)] = 1.0
    """0 is greedy."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    """Drop tokens less likely than min_p times the likeliest."""
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=1024)] = {}
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """Random numbers are keyed by (seed, position in the sequence): a migrated request continues as it was."""
    stop_token_ids: Annotated[list[int], msgspec.Meta(max_length=64)] = []
    ignore_eos: bool = False
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """No end-of-text or stop token before this many output tokens (counted from the original prompt)."""
    num_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=20)] = -1
    """-1: none; 0: the chosen token's; k: also the k likeliest."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log probability of one chosen token, and the likeliest alternatives (ids and log probabilities, same length)."""

    logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a request cost, as the worker counted it."""

    num_prompt_tokens: Count = 0
    num_output_tokens: Count = 0
    num_cached_tokens: Count = 0
    """Prompt tokens whose KV was reused from an earlier request (by prefill or decode), not computed for this one."""
    num_computed_tokens: Count = 0
    """Prompt tokens computed for this attempt, by prefill and decode together."""
    num_loaded_blocks: Count = 0
    """Blocks the decode worker loaded from the KV store."""
    num_loaded_bytes: Count = 0
    prefill_ms: float = 0.0
    queue_ms: float = 0.0
    decode_ms: float = 0.0
