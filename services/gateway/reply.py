"""Replies in the OpenAI API's shapes, whole or in chunks. Both doors use them; only the framing differs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import accumulate
from typing import Any

import msgspec

from services.gateway.generation import Generation, Piece
from services.gateway.openai import ChatBody, CompletionBody, GenerationBody
from services.gateway.tokenizer import Tokenizer
from shared.errors import RequestError, SlipstreamError
from shared.types import TokenLogprob

Json = dict[str, Any]

encode = msgspec.json.encode
_MARK = "\0"
"""Stands for the text in a chunk; no other part of one has it."""


def error_body(error: SlipstreamError) -> Json:
    """The API's error object: all four keys, nothing but what is safe to show."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


class Reply(ABC):
    """Renders the pieces of one generation. `chunks` for streams, `whole` at the end for the rest."""

    object_name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, generation: Generation, body: GenerationBody) -> None:
        self._generation = generation
        self._tokenizer: Tokenizer = generation.admitted.model.tokenizer
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._continuous = self._with_usage and bool(options and options.continuous_usage_stats)
        self._head: Json = {
            "id": f"{self.id_prefix}-{generation.admitted.requests[0].request_id}",
            "object": self.chunk_name,
            "created": generation.started_ns // 1_000_000_000,
            "model": generation.admitted.model.card.name,
        }
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """By choice that has begun: what stands before and behind the text of a chunk that has nothing else to say."""
        num = len(generation.admitted.requests)
        self._texts: list[list[str]] = [[] for _ in range(num)]
        self._reasons: list[str | None] = [None] * num
        self._logprobs: list[dict[str, list[bytes]]] = [{} for _ in range(num)]
        """Each list of a choice's logprobs, as JSON of the pieces so far, without its brackets."""
        self._num_chars = [0] * num
        """In the tokens of a choice whose logprobs were rendered."""

    # -- streams ---------------------------------------------------------------------------------------------------------------
    def chunks(self, piece: Piece) -> list[bytes]:
        """What to send for a piece, as JSON; maybe nothing."""
        frame = self._frames.get(piece.choice)
        if frame is not None and piece.reason is None and not piece.logprobs and not self._continuous:
            return [frame[0] + encode(piece.text) + frame[1]] if piece.text else []
        made = []
        if frame is None:
            self._frames[piece.choice] = self._frame(piece.choice)
            made += self._first(piece.choice)
        if piece.text or piece.reason is not None or piece.logprobs:
            made.append(self._chunk(piece.choice, piece.text, piece.reason, self._render_logprobs(piece)))
        return [encode(chunk) for chunk in made]

    def _frame(self, index: int) -> tuple[bytes, bytes]:
        before, _, behind = encode(self._chunk(index, _MARK, None, None)).partition(encode(_MARK))
        return before, behind

    def last_chunks(self) -> list[bytes]:
        """Behind all choices, as JSON: the usage, if it was asked for."""
        return [encode({**self._head, "choices": [], "usage": self.usage()})] if self._with_usage else []

    def _wrap(self, choice: Json) -> Json:
        chunk: Json = {**self._head, "choices": [choice]}
        if self._with_usage:
            chunk["usage"] = self.usage() if self._continuous else None
        return chunk

    # -- whole -----------------------------------------------------------------------------------------------------------------
    def add(self, piece: Piece) -> None:
        """Keep a piece for `whole`. Its logprobs are rendered now: at the end, all of them would hold up everybody for seconds."""
        self._texts[piece.choice].append(piece.text)
        self._reasons[piece.choice] = piece.reason
        for name, values in (self._render_logprobs(piece) or {}).items():
            self._logprobs[piece.choice].setdefault(name, []).append(encode(values)[1:-1])

    def whole(self) -> Json:
        """After the last piece."""
        choices = [
            self._choice(index, "".join(texts), self._reasons[index], self._all_logprobs(index)) for index, texts in enumerate(self._texts)
        ]
        return {**self._head, "object": self.object_name, "choices": choices, "usage": self.usage()}

    def usage(self) -> Json:
        generation = self._generation
        prompt, output = generation.admitted.num_prompt_tokens, generation.num_output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }

    def _all_logprobs(self, index: int) -> Json | None:
        return {name: msgspec.Raw(b"[" + b",".join(parts) + b"]") for name, parts in self._logprobs[index].items()} or None

    @staticmethod
    def _pairs(piece: Piece) -> list[tuple[int, TokenLogprob]]:
        return list(zip(piece.token_ids, piece.logprobs, strict=False))

    @abstractmethod
    def _first(self, index: int) -> list[Json]:
        """Before a choice's first text."""

    @abstractmethod
    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json: ...

    @abstractmethod
    def _choice(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json: ...

    @abstractmethod
    def _render_logprobs(self, piece: Piece) -> Json | None:
        """Lists with an entry a token, by their names; None without any."""


class ChatReply(Reply):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def _first(self, index: int) -> list[Json]:
        return [self._wrap({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})]

    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json:
        return self._wrap({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason})

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _render_logprobs(self, piece: Piece) -> Json | None:
        pairs = self._pairs(piece)
        if not pairs:
            return None
        return {"content": [msgspec.Raw(self._token(token_id, one)) for token_id, one in pairs]}

    def _token(self, token_id: int, one: TokenLogprob) -> bytes:
        """As JSON, put together from parts: 20 alternatives a token are most of what such a reply costs."""
        text_of = self._tokenizer.token_text
        top = [_named(text_of(token_id)) + encode(logprob) for token_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True)]
        alternatives = b"},".join(top) + b"}" if top else b""
        return _named(text_of(token_id)) + encode(one.logprob) + b',"top_logprobs":[' + alternatives + b"]}"


@lru_cache(2**17)
def _named(text: str) -> bytes:
    """The beginning of a token's JSON object, up to its logprob."""
    return encode({"token": text, "bytes": list(text.encode())})[:-1] + b',"logprob":'


class CompletionReply(Reply):
    object_name = "text_completion"
    chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, generation: Generation, body: CompletionBody) -> None:
        super().__init__(generation, body)
        admitted = generation.admitted
        self._echo = [self._tokenizer.decode(prompt) for prompt in admitted.prompts] if body.echo else []

    def _echoed(self, index: int) -> str:
        return self._echo[index // self._generation.admitted.num_choices] if self._echo else ""

    def _first(self, index: int) -> list[Json]:
        return [self._chunk(index, self._echoed(index), None, None)] if self._echo else []

    def _chunk(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json:
        return self._wrap({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})

    def _choice(self, index: int, text: str, reason: str | None, logprobs: Json | None) -> Json:
        return {"index": index, "text": self._echoed(index) + text, "logprobs": logprobs, "finish_reason": reason}

    def _render_logprobs(self, piece: Piece) -> Json | None:
        pairs = self._pairs(piece)
        if not pairs:
            return None
        tokens = [self._tokenizer.token_text(token_id) for token_id, _ in pairs]
        *offsets, self._num_chars[piece.choice] = accumulate(map(len, tokens), initial=self._num_chars[piece.choice])
        top = [
            {self._tokenizer.token_text(token_id): value for token_id, value in zip(one.top_ids, one.top_logprobs, strict=True)}
            for _, one in pairs
        ]
        return {"tokens": tokens, "token_logprobs": [one.logprob for _, one in pairs], "top_logprobs": top, "text_offset": offsets}


def make_reply(generation: Generation, body: GenerationBody) -> Reply:
    if isinstance(body, CompletionBody):
        return CompletionReply(generation, body)
    assert isinstance(body, ChatBody)
    return ChatReply(generation, body)
