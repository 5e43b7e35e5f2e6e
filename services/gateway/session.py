"""One request: epoch, instance, index, terminal event. A pure state machine: events in, actions out.

The session accepts output token `index` of the current epoch exactly once and in order, from one instance an epoch: the one whose tokens or
Finish came first. It ends exactly once. `now_s` is the link clock: it stands still while the gateway itself is cut off.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass
from typing import Literal

import msgspec

from shared.errors import DeadlineExceeded, RequestCancelled, RequestError, SlipstreamError, WorkerLost
from shared.messages.codec import decode, encode
from shared.messages.request import Cancel, GenerateRequest
from shared.messages.session import Finish, FinishReply, HeldRequest, TokenDelta
from shared.types import FinishReason, InstanceId, TokenLogprob, Usage, pack_tokens, unpack_tokens

LOST_S = 2.0
"""Without a sign of life for so long, whoever held the request is lost."""
RESEND_AGAIN_S = 0.25
MAX_MIGRATIONS = 3

Holder = Literal["router", "prefill", "decode", ""]


class Submit(msgspec.Struct, frozen=True):
    """Publish this attempt."""

    request: GenerateRequest


class Tell(msgspec.Struct, frozen=True):
    """Publish this cancel."""

    cancel: Cancel


class AskResend(msgspec.Struct, frozen=True):
    """Ask the instance for the tokens from `index` on."""

    instance: InstanceId
    index: int


class Count(msgspec.Struct, frozen=True):
    """Something to be counted."""

    what: Literal["stale_epoch", "foreign_instance", "duplicate", "gap", "resubmitted", "migrated", "crc_mismatch"]


Action = Submit | Tell | AskResend | Count


@dataclass(frozen=True, slots=True)
class End:
    """The terminal event: a reason, or an error."""

    reason: FinishReason | None
    error: SlipstreamError | None
    usage: Usage


class Session:
    """`request` is the first attempt (epoch 0); later ones are derived from it and the tokens accepted so far."""

    def __init__(self, request: GenerateRequest, now_s: float) -> None:
        self.first = request
        self.epoch = request.epoch
        self.output: list[int] = []
        """Accepted output tokens; index = position."""
        self._logprobs: deque[bytes] = deque()
        """Of output tokens that were not taken yet, packed: of a reader that is slow, a million objects would wait here."""
        self.end: End | None = None
        self.instance: InstanceId | None = None
        self.prefill_worker: InstanceId | None = None
        self.explanation = ""
        """Why the current attempt was routed where it is, if the caller asked."""
        self.num_migrations = 0
        self.num_cached_tokens: int | None = None
        """Of the prompt, as the worker of the first token told: for a later one, what this request itself left behind is cached too."""
        self._holder: InstanceId | None = None
        self._holder_role: Holder = ""
        self._heard_s = now_s
        self._deadline_s = now_s + request.deadline_ms / 1000
        self._asked_s = -1.0

    # -- from the workers ------------------------------------------------------------------------------------------------
    def on_tokens(self, instance: InstanceId, delta: TokenDelta, now_s: float) -> list[Action]:
        """Tokens of one step, or resent ones."""
        foreign = self._foreign(instance, delta.epoch)
        if foreign is not None:
            return foreign
        self._choose(instance, now_s)
        if self.num_cached_tokens is None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.index > len(self.output):
            return [Count("gap"), *self._ask_resend(now_s)]
        fresh = delta.token_ids[len(self.output) - delta.index :]
        if not fresh:
            return [Count("duplicate")]
        if delta.logprobs is not None:
            self._logprobs += map(encode, delta.logprobs[len(self.output) - delta.index :])
        self.output += fresh
        return []

    def on_progress(self, instance: InstanceId, role: Holder, held: HeldRequest, now_s: float) -> list[Action]:
        """Somebody says that it holds the request."""
        if self.end is not None or held.epoch != self.epoch or (self.instance is not None and instance != self.instance):
            return []
        self._heard_s = now_s
        self._holder, self._holder_role = instance, role
        if self.instance is not None and held.num_output_tokens > len(self.output):
            return self._ask_resend(now_s)  # messages of one sender keep their order: what it counts is lost, not late
        if self.instance is None and role == "decode" and held.num_output_tokens > len(self.output):
            self._choose(instance, now_s)
            return self._ask_resend(now_s)
        return []

    def on_finish(self, finish: Finish, now_s: float) -> tuple[FinishReply, list[Action]]:
        """The attempt is over at its worker. `done` False: tokens are missing."""
        foreign = self._foreign(finish.instance, finish.epoch)
        if foreign is not None:
            return FinishReply(True), foreign
        if finish.error_code:
            self._finish(None, failure(finish), finish)
            return FinishReply(True), []
        self._choose(finish.instance, now_s)
        self._take_last(finish)
        if len(self.output) < finish.num_output_tokens:
            return FinishReply(False, len(self.output)), [Count("gap")]
        if len(self.output) > finish.num_output_tokens or zlib.crc32(pack_tokens(self.output)) != finish.crc32:
            self._finish(None, SlipstreamError("the tokens received are not the tokens sent"), finish)
            return FinishReply(True), [Count("crc_mismatch")]
        self._finish(finish.reason, None, finish)
        return FinishReply(True), []

    def take_logprobs(self, limit: int) -> list[TokenLogprob]:
        """The next ones, once."""
        return [decode(TokenLogprob, self._logprobs.popleft()) for _ in range(min(limit, len(self._logprobs)))]

    def wants(self, epoch: int) -> bool:
        return self.end is None and epoch == self.epoch

    # -- from the clock and the fleet ----------------------------------------------------------------------------------------
    def on_lost(self, instance: InstanceId, now_s: float, *, has_router: bool) -> list[Action]:
        """The lease of `instance` ended."""
        if self.end is None and instance == (self.instance or self._holder):
            return self._resubmit(now_s, has_router=has_router)
        return []

    def tick(self, now_s: float, *, has_router: bool) -> list[Action]:
        """Time passes."""
        if self.end is not None:
            return []
        if now_s >= self._deadline_s:
            return self.cancel(DeadlineExceeded("the request did not end before its deadline"))
        if now_s - self._heard_s > LOST_S:
            return self._resubmit(now_s, has_router=has_router)
        return []

    # -- from the client -----------------------------------------------------------------------------------------------------
    def cancel(self, error: RequestError | None = None) -> list[Action]:
        """The client went away, or `error` ends the request here."""
        if self.end is not None:
            return []
        self._finish(None, error or RequestCancelled("the request was cancelled"), None)
        return [Tell(Cancel(self.first.request_id, self.epoch))]

    def stop(self) -> list[Action]:
        """A stop string was found in the text: complete, as far as the client is concerned."""
        if self.end is not None:
            return []
        self._finish("stop", None, None)
        return [Tell(Cancel(self.first.request_id, self.epoch))]

    # -- inside --------------------------------------------------------------------------------------------------------------
    def _foreign(self, instance: InstanceId, epoch: int) -> list[Action] | None:
        """None: this instance may speak for this epoch. Otherwise what to do about it."""
        if self.end is not None or epoch != self.epoch:
            return [Count("stale_epoch")]
        if self.instance is not None and instance != self.instance:
            return [Count("foreign_instance"), Tell(Cancel(self.first.request_id, epoch, instance))]
        return None

    def _choose(self, instance: InstanceId, now_s: float) -> None:
        self.instance = self._holder = instance
        self._holder_role = "decode"
        self._heard_s = now_s

    def _ask_resend(self, now_s: float) -> list[Action]:
        if self.instance is None or now_s - self._asked_s < RESEND_AGAIN_S:
            return []
        self._asked_s = now_s
        return [AskResend(self.instance, len(self.output))]

    def _take_last(self, finish: Finish) -> None:
        last = unpack_tokens(finish.last_token_ids)
        start = finish.num_output_tokens - len(last)
        if start <= len(self.output) < finish.num_output_tokens:
            have = len(self.output) - start
            self.output += last[have:]
            if finish.last_logprobs:
                self._logprobs += map(encode, finish.last_logprobs[have:])

    def _resubmit(self, now_s: float, *, has_router: bool) -> list[Action]:
        """A new epoch with the tokens so far, preceded by a cancel of the old one. Without any router there is nobody to take it: wait."""
        if not has_router:
            self._heard_s = now_s
            return []
        counted: list[Action] = []
        if self._holder_role in ("prefill", "decode"):
            self.num_migrations += 1
            counted = [Count("migrated")]
            if self.num_migrations > MAX_MIGRATIONS:
                lost = WorkerLost(f"the request was moved {MAX_MIGRATIONS} times, and its worker was lost each time")
                return self.cancel(lost)
        cancel = Cancel(self.first.request_id, self.epoch)
        if len(self.output) >= self.first.sampling.max_tokens:
            self._finish("length", None, None)  # everything was there; only the Finish was lost with its worker
            return [Tell(cancel)]
        self.epoch += 1
        self.instance = self._holder = None
        self._holder_role = ""
        self._heard_s, self._asked_s = now_s, -1.0
        return [Count("resubmitted"), *counted, Tell(cancel), Submit(self.attempt(now_s))]

    def attempt(self, now_s: float) -> GenerateRequest:
        """The current epoch's request."""
        left = self.first.sampling.max_tokens - len(self.output)
        return msgspec.structs.replace(
            self.first,
            epoch=self.epoch,
            token_ids=self.first.token_ids + pack_tokens(self.output),
            num_emitted=len(self.output),
            sampling=msgspec.structs.replace(self.first.sampling, max_tokens=max(left, 1)),
            deadline_ms=max(int((self._deadline_s - now_s) * 1000), 0),
        )

    def _finish(self, reason: FinishReason | None, error: SlipstreamError | None, finish: Finish | None) -> None:
        assert self.end is None
        usage = finish.usage if finish is not None else Usage(self.first.num_prompt_tokens, len(self.output))
        if self.num_cached_tokens is None:
            self.num_cached_tokens = usage.num_cached_tokens
        else:
            usage = msgspec.structs.replace(usage, num_cached_tokens=self.num_cached_tokens)
        self.prefill_worker = finish.prefill_worker if finish is not None else None
        self.end = End(reason, error, usage)


def failure(finish: Finish) -> SlipstreamError:
    """The error that a Finish tells of, with the class that has its code."""
    message = finish.error_message or "the request failed"
    for kind in _kinds(SlipstreamError):
        if kind.code == finish.error_code and issubclass(kind, RequestError) and kind.__init__ is RequestError.__init__:
            return kind(message, retry_after_s=finish.retry_after_s)
    error = SlipstreamError(message)
    error.code = finish.error_code  # type: ignore[misc]
    return error


def _kinds(root: type[SlipstreamError]) -> list[type[SlipstreamError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _kinds(child))]
