"""One client call in work: its choices' sessions, merged into one flow of events that both doors render."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Literal

import msgspec

from services.gateway.admission import Admitted
from services.gateway.news import News
from services.gateway.openai import ChatBody, GenerationBody
from services.gateway.sessions import Sessions, Stream
from services.gateway.text import ChoiceText
from shared.errors import RequestCancelled, SlipstreamError
from shared.messages.fleet import UsageRecord
from shared.telemetry.telemetry import Attribute
from shared.types import FinishReason, InstanceId, TokenLogprob, Usage

Door = Literal["http", "nats"]


class Piece(msgspec.Struct, frozen=True, gc=False):
    """What one choice has to say: new text (maybe none yet), and at its end the reason."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    reason: FinishReason | None = None
    usage: Usage | None = None


class Choice:
    """One request of the call."""

    def __init__(self, index: int, stream: Stream, text: ChoiceText) -> None:
        self.index = index
        self.stream = stream
        self._text = text
        self._has_logprobs = stream.session.first.sampling.num_logprobs >= 0
        self.is_over = False

    def take(self, sessions: Sessions) -> Piece | None:
        """What is new; None: nothing yet. A request that failed raises its error."""
        session = self.stream.session
        token_ids, end = self.stream.take(), session.end
        if end is None and not token_ids:
            return None
        is_last = end is not None and not self.stream.is_behind
        if end is not None and end.error is not None:
            raise end.error
        text = self._text.push(token_ids, is_last=is_last, ended_by_token=is_last and end is not None and end.reason == "stop")
        if self._text.is_stopped and end is None:
            sessions.stop(self.stream)
            end = session.end
        logprobs = session.take_logprobs(len(token_ids)) if self._has_logprobs else []
        if not is_last and not self._text.is_stopped:
            return Piece(self.index, text, token_ids, logprobs)
        assert end is not None
        self.is_over = True
        return Piece(self.index, text, token_ids, logprobs, "stop" if self._text.is_stopped else end.reason, end.usage)


def operation_of(body: GenerationBody) -> str:
    """By the GenAI conventions."""
    return "chat" if isinstance(body, ChatBody) else "text_completion"


class Generation:
    """Use as a context: leaving it cancels what still runs. `pieces` may be read once."""

    def __init__(self, admitted: Admitted, body: GenerationBody, sessions: Sessions, door: Door, tenant: str) -> None:
        self.admitted = admitted
        self.door = door
        self.tenant = tenant
        self.started_ns = time.time_ns()
        self.first_token_ns = 0
        self.num_output_tokens = 0
        self._body = body
        self._sessions = sessions
        self._news = News()
        """Of all choices."""
        self.choices: list[Choice] = []

    async def __aenter__(self) -> Generation:
        try:
            for index, request in enumerate(self.admitted.requests):
                self.choices.append(Choice(index, await self._sessions.open(request, self._news), self._new_text()))
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs. Idempotent."""
        for choice in self.choices:
            self._sessions.close(choice.stream)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Of all choices, as they come: what came together, a piece of a choice at most. Loops that a token passes are written out."""
        left = self.choices
        while left:
            await self._news.wait()
            pieces: list[Piece] = []
            is_behind = is_over = False
            for choice in left:
                piece = choice.take(self._sessions)
                if piece is not None:
                    pieces.append(piece)
                    self._note(piece)
                    is_over = is_over or piece.reason is not None
                    is_behind = is_behind or choice.stream.is_behind
            if pieces:
                yield pieces
            if is_over:
                left = [choice for choice in left if not choice.is_over]
            if is_behind:
                self._news.tell()
                await asyncio.sleep(0)

    def _note(self, piece: Piece) -> None:
        if not self.first_token_ns and piece.token_ids:
            self.first_token_ns = time.time_ns()
        self.num_output_tokens += len(piece.token_ids)

    def _new_text(self) -> ChoiceText:
        stop = [self._body.stop] if isinstance(self._body.stop, str) else self._body.stop or []
        model = self.admitted.model
        ends = model.eos_token_ids | frozenset(self._body.stop_token_ids or [])
        return ChoiceText(model.tokenizer.stream(), stop, ends, keep_stop=self._body.include_stop_str_in_output)

    # -- what is known afterwards ----------------------------------------------------------------------------------------------
    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens reused, of each prompt once (its choices share it): as far as it is known."""
        return sum(choice.stream.session.num_cached_tokens or 0 for choice in self.choices[:: self.admitted.num_choices])

    def usages(self) -> list[Usage]:
        """Of the choices that have ended."""
        return [choice.stream.session.end.usage for choice in self.choices if choice.stream.session.end is not None]

    def workers(self) -> tuple[InstanceId | None, InstanceId | None]:
        """(prefill, decode) of the first choice, as far as they are known."""
        session = self.choices[0].stream.session if self.choices else None
        return (session.prefill_worker, session.instance) if session else (None, None)

    def worker_names(self) -> tuple[str | None, str | None]:
        """The same, as people call them."""
        prefill, decode = self.workers()
        return self._sessions.name_of(prefill), self._sessions.name_of(decode)

    def attributes(self, record: UsageRecord, error: BaseException | None) -> dict[str, Attribute]:
        """Of the call's span: the GenAI conventions' names, then ours, then what only some calls have. No text."""
        sampling, body = self.admitted.requests[0].sampling, self._body
        told: dict[str, Attribute] = {
            "gen_ai.operation.name": operation_of(body),
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.output.type": "text",
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.stream": bool(body.stream),
            "gen_ai.request.choice.count": self.admitted.num_choices,
            "gen_ai.response.finish_reasons": [str(end.reason) for one in self.choices if (end := one.stream.session.end) and end.reason],
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
            "request_id": record.request_id,
            "door": record.door,
            "outcome": record.outcome,
            "num_migrations": record.num_migrations,
            "ttft_ms": record.ttft_ms,
            "decode_worker": record.decode_worker or "",
            "prefill_worker": record.prefill_worker or "",
        }
        asked = {
            "gen_ai.request.seed": body.seed,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.response.time_to_first_chunk": record.ttft_ms / 1000 or None,
            "error.type": record.outcome if error else None,
        }
        return told | {name: value for name, value in asked.items() if value is not None}

    def record(self, gateway: InstanceId, error: BaseException | None) -> UsageRecord:
        """For the ledger; no text."""
        now_ns = time.time_ns()
        prefill, decode = self.workers()
        ends = [choice.stream.session.end for choice in self.choices]
        reasons = [end.reason for end in ends if end is not None and end.reason]
        outcome = error.code if isinstance(error, SlipstreamError) else RequestCancelled.code if error else reasons[0] if reasons else ""
        return UsageRecord(
            request_id=self.admitted.requests[0].request_id,
            tenant=self.tenant,
            model=self.admitted.model.card.name,
            door=self.door,
            outcome=outcome,
            num_prompt_tokens=self.admitted.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_migrations=sum(choice.stream.session.num_migrations for choice in self.choices),
            ttft_ms=(self.first_token_ns - self.started_ns) / 1e6 if self.first_token_ns else 0.0,
            e2e_ms=(now_ns - self.started_ns) / 1e6,
            started_at_ns=self.started_ns,
            gateway=gateway,
            decode_worker=decode,
            prefill_worker=prefill,
        )
