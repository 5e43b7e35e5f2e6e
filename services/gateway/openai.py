"""The OpenAI API's bodies, typed and bounded: what does not fit is refused before anything is spent on it.

Fields that are known and have no effect here are listed in IGNORED; fields that need what is not built are refused by `admission`.
"""

from __future__ import annotations

import gc
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from shared.errors import BadRequest

MAX_CHOICES = 8
MAX_TOKENS = 2**20
MAX_DETOKENIZED = 2**17
"""Token ids in one call of /detokenize: more than any model's context, and no more than is done at once."""

Probability = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
TokenCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class TextPart(msgspec.Struct):
    """Only text is served; another type of part is refused by its name."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def rendered(self) -> dict[str, Any]:
        """As chat templates expect it: `developer` is `system`, parts are one text."""
        parts = self.content
        text = "".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        extra = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in extra.items() if value is not None}


class Wishes(msgspec.Struct, kw_only=True):
    """What only Slipstream knows; `extra_body={"slipstream": {...}}` in OpenAI's client."""

    deadline_ms: Annotated[int, msgspec.Meta(ge=1, le=3_600_000)] | None = None
    """When the answer is of no use any more: then the call ends with 504, and with 429 at once if it could not even begin in time."""


class GenerationBody(msgspec.Struct, kw_only=True):
    """What chat and completions share."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=MAX_TOKENS)] | None = None
    min_p: Probability | None = None
    max_tokens: TokenCount | None = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=64)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=2.0)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]], msgspec.Meta(max_length=1024)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] | None = None
    service_tier: str | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] | None = None
    response_format: dict[str, Any] | None = None
    slipstream: Wishes | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1024)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], msgspec.Meta(max_length=16)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions. `prompt`: a text, texts, token ids, or lists of token ids."""

    prompt: str | Annotated[list[str | int | list[TokenId]], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)]
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_DETOKENIZED)]
    model: str | None = None


IGNORED = frozenset(
    {
        "user",
        "safety_identifier",
        "metadata",
        "store",
        "verbosity",
        "prediction",
        "moderation",
        "web_search_options",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
        "request_id",
        "reasoning_effort",
        "include_reasoning",
    }
)
"""Accepted without effect, as clients send them everywhere. The answer names them, as it names unknown fields."""

B = TypeVar("B", bound=msgspec.Struct)
_PATH = re.compile(r" - at `\$\.?(.*)`$")
_INDEX = re.compile(r"\[[\d.]+\]$")
"""Behind the name of a list: which of its entries it was, the message tells."""
MAX_CAUSE = 200
"""Characters of what is wrong with a field: it may quote its value, which may be the whole body."""


def parse_body(body_type: type[B], body: bytes, *, is_msgpack: bool = False) -> tuple[B, list[str]]:
    """The body, and the fields of it that have no effect here, in their order. Raises BadRequest with the field's path as `param`.

    Nothing else runs meanwhile, and a body may be a million little objects: the garbage collector would look at all of them again and
    again, for most of the time.
    """
    gc.disable()
    try:
        fields = msgspec.msgpack.decode(body) if is_msgpack else None
        parsed = msgspec.convert(fields, body_type) if is_msgpack else msgspec.json.decode(body, type=body_type)
        if fields is None:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        at, missing = path[1] if path else "", _missing(message)
        cause = f"field {missing} is required" if missing else _PATH.sub("", message).replace("`", "")
        cause = f"{at or 'the body'}: {cause[:1].lower()}{cause[1:MAX_CAUSE]}" if at or not missing else cause
        raise BadRequest(cause, param=(_INDEX.sub("", at) if at else missing)) from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid {'msgpack' if is_msgpack else 'JSON'}: {_malformed(error)}") from error
    finally:
        gc.enable()
    return parsed, [str(field) for field in fields if field not in body_type.__struct_fields__]


def _malformed(error: Exception) -> str:
    """What is wrong, and at which byte where it is known."""
    match error:
        case RecursionError():
            return "it is nested too deeply"
        case UnicodeDecodeError():
            return f"not UTF-8 (byte {error.start})"
        case _:
            return str(error).rpartition("malformed: ")[2].lower()


def _missing(message: str) -> str | None:
    """`Object missing required field `model`` → model."""
    found = re.search(r"required field `(\w+)`", message)
    return found[1] if found else None
