"""Text to tokens and back, and the model's chat template (sandboxed). With `detokenizer` the only importer of tokenizers, and of jinja2."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer as HfTokenizer

from services.gateway.detokenizer import ByteStream, DecodedStream, TextStream, TokenBytes, is_byte_level
from shared.errors import BadRequest, ModelFault, PromptTooLong

LONG_TEXT_CHARS = 12_000
"""About 3,000 tokens: above this, tokenising leaves the event loop."""
SUSPECT_CHARS = 8
"""A text of more than so many characters for each token that may be is counted piece by piece first, until it is too long."""
PIECE_SLACK = 16
"""Cutting a text may make tokens: of a piece's, so many are not counted."""


class TemplateRefusal(jinja2.TemplateError):
    """The template itself refused the messages (`raise_exception`)."""


class Tokenizer:
    """One model's tokenizer and template, read once."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = HfTokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
        except Exception as error:  # the tokenizers package raises plain Exception
            raise ModelFault(f"{folder}: the tokenizer cannot be read: {error}", remedy="Set SS_TOKENIZER_PATH") from error
        self._special = {name: _text_of(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        self._bytes = TokenBytes(self._tokenizer) if is_byte_level(self._tokenizer) else None
        self._template = _compile(config.get("chat_template"))
        self._texts: dict[int, str] = {}
        """Of tokens that `token_text` was asked for: there are no more than the vocabulary has."""

    async def encode(self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """Token ids. Raises PromptTooLong for a text that is far too long for `max_tokens`, before all of it is tokenised."""
        try:
            if len(text) <= LONG_TEXT_CHARS:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            return await asyncio.to_thread(self._encode_long, text, add_special_tokens, max_tokens)
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise BadRequest("the text is not valid Unicode") from error

    def _encode_long(self, text: str, add_special_tokens: bool, max_tokens: int | None) -> list[int]:
        """In a thread. By batches of one, which let other threads run; `encode` would hold the interpreter's lock to its end."""
        if max_tokens is not None and len(text) > SUSPECT_CHARS * max_tokens:
            count = 0
            for start in range(0, len(text), LONG_TEXT_CHARS):
                piece = text[start : start + LONG_TEXT_CHARS]
                count += max(len(self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids) - PIECE_SLACK, 0)
                if count > max_tokens:
                    raise PromptTooLong(count, max_tokens, is_whole=False)
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """One token on its own, for logprobs; special tokens show as they are written."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = str(self._tokenizer.decode([token_id], skip_special_tokens=False))
        return text

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The chat as text. Raises BadRequest if the model has no template, or if it refuses."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self._template.render(messages=list(messages), **self._special, **options)
        except TemplateRefusal as error:
            raise BadRequest(f"the chat template refuses these messages: {str(error)[:200]}", param="messages") from error
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRequest("the chat template cannot render these messages", param="messages") from error

    def stream(self) -> TextStream:
        return ByteStream(self._bytes) if self._bytes is not None else DecodedStream(self._tokenizer)


def _compile(template: object) -> jinja2.Template | None:
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelFault(f"the chat template does not compile: {error}") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateRefusal(message)


def _text_of(token: object) -> str:
    """`"</s>"`, or `{"content": "</s>"}`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
