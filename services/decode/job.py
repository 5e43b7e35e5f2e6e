"""One attempt of a request, as a decode worker holds it."""

from __future__ import annotations

import asyncio
import zlib
from enum import Enum, auto

import msgspec

from shared.bus.base import Delivery
from shared.engine.engine import Sampled
from shared.engine.sequence import Sequence
from shared.errors import SlipstreamError
from shared.messages.request import DecodeTask, GenerateRequest
from shared.messages.session import Finish, HeldRequest, Stage, TokenDelta
from shared.types import FinishReason, InstanceId, TokenLogprob, Usage, pack_tokens, unpack_tokens
from shared.worker.chain import Chain

LAST_TOKENS = 64
"""Tokens that a Finish repeats."""
DELTA_TOKENS = 4096
DELTA_LOGPROBS = 16_384
"""A delta carries at most so many tokens, and log probabilities: it must fit into a message. The gateway asks for what follows."""


class State(Enum):
    """WAITING for blocks → LOADING blocks → READY for a slot → RUNNING → ENDED (its Finish is under way)."""

    WAITING = auto()
    LOADING = auto()
    READY = auto()
    RUNNING = auto()
    ENDED = auto()


class Job:
    """Sequence, delivery and everything that the Finish will say. Times are monotonic seconds."""

    def __init__(self, task: DecodeTask, delivery: Delivery, chain: Chain | None, now_s: float) -> None:
        request = task.request
        self.task = task
        self.request: GenerateRequest = request
        self.num_prefix_tokens = request.num_tokens
        """Tokens that were there when the task came: prompt and earlier epochs' output."""
        self.delivery = delivery
        self.chain = chain
        """None: the task is of another model digest and is computed without reuse."""
        self.taken_s = now_s
        self.started_s = now_s
        self.state = State.WAITING
        self.is_cancelled = False
        self.fate = ""
        """Why nobody wants it any more."""
        self.beside: asyncio.Task[None] | None = None
        """What is under way for the job beside the loop: the load of its prefix, or its Finish."""
        self.sequence = Sequence(key_of(request), unpack_tokens(request.token_ids), request.num_prompt_tokens, request.sampling)
        self.logprobs: list[TokenLogprob] = []
        """One for each output token of this epoch, if asked for."""
        self.was_preempted = False
        """What it finds cached from now on may be its own work."""
        self.num_device_tokens = 0
        """Tokens whose blocks this worker's own pool held already."""
        self.num_loaded_tokens = 0
        self.num_loaded_blocks = 0
        self.num_loaded_bytes = 0
        self.num_cached_blocks = 0
        """Full blocks known to the pool's prefix cache."""
        self.num_computed_prompt_tokens = 0
        self.error: SlipstreamError | None = None
        self.reason: FinishReason | None = None

    @property
    def num_new_tokens(self) -> int:
        """Output tokens of this epoch."""
        return len(self.sequence.token_ids) - self.num_prefix_tokens

    @property
    def is_computing_prompt(self) -> bool:
        return self.sequence.num_uncomputed_tokens > 1 or self.sequence.num_computed_tokens < self.num_prefix_tokens - 1

    def abandon(self, fate: str = "cancelled") -> None:
        self.is_cancelled, self.fate = True, fate
        if self.beside is not None:
            self.beside.cancel()

    def append(self, sampled: Sampled) -> None:
        self.sequence.token_ids.append(sampled.token_id)
        if sampled.logprob is not None and self.sequence.sampling.num_logprobs >= 0:
            self.logprobs.append(sampled.logprob)

    def delta(self, index: int) -> TokenDelta:
        """Output tokens from `index` on (of this epoch at most), as many as a message holds."""
        request, sequence = self.request, self.sequence
        start = max(index, request.num_emitted)
        at, num_logprobs = sequence.num_prompt_tokens + start, sequence.sampling.num_logprobs
        if num_logprobs < 0:
            token_ids, logprobs = sequence.token_ids[at : at + DELTA_TOKENS], None
        else:
            limit, first = min(DELTA_TOKENS, DELTA_LOGPROBS // (num_logprobs + 1)), start - request.num_emitted
            token_ids, logprobs = sequence.token_ids[at : at + limit], self.logprobs[first : first + limit]
        num_cached = self.num_cached_tokens if start == request.num_emitted else None
        return TokenDelta(request.request_id, request.epoch, start, token_ids, logprobs, num_cached)

    def held(self) -> HeldRequest:
        """For Progress."""
        stage: Stage = "waiting" if self.state in (State.WAITING, State.LOADING, State.READY) else "decode"
        return HeldRequest(self.request.request_id, self.request.epoch, stage, self.sequence.num_output_tokens)

    def finish(self, instance: InstanceId, now_s: float) -> Finish:
        """The Finish of an ended job."""
        output = self.sequence.token_ids[self.request.num_prompt_tokens :]
        last = output[max(len(output) - min(LAST_TOKENS, self.num_new_tokens), 0) :]
        finish = Finish(
            request_id=self.request.request_id,
            epoch=self.request.epoch,
            instance=instance,
            reason=self.reason,
            num_output_tokens=len(output),
            crc32=zlib.crc32(pack_tokens(output)),
            last_token_ids=pack_tokens(last),
            last_logprobs=self.logprobs[len(self.logprobs) - len(last) :] if self.logprobs and last else None,
            usage=self._usage(len(output), now_s),
            decode_worker=instance,
            prefill_worker=self.task.prefill_worker,
        )
        if self.error is None:
            return finish
        return msgspec.structs.replace(finish, reason=None, error_code=self.error.code, error_message=self.error.message[:512])

    @property
    def num_cached_tokens(self) -> int:
        """For Usage."""
        loaded = self.num_device_tokens + self.num_loaded_tokens
        cached = self.task.num_cached_tokens if self.task.prefill_worker else loaded
        return min(cached, loaded, max(self.request.num_prompt_tokens - 1, 0))

    def _usage(self, num_output_tokens: int, now_s: float) -> Usage:
        by_prefill = max(self.task.num_prefilled_tokens - self.task.num_cached_tokens, 0)
        return Usage(
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_computed_tokens=by_prefill + self.num_computed_prompt_tokens,
            num_loaded_blocks=self.num_loaded_blocks,
            num_loaded_bytes=self.num_loaded_bytes,
            prefill_ms=self.task.prefill_ms,
            queue_ms=self.task.queue_ms,
            decode_ms=(now_s - self.taken_s) * 1000,
        )


def key_of(request: GenerateRequest) -> str:
    """`request_id:epoch`."""
    return f"{request.request_id}:{request.epoch}"
