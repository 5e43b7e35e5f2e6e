"""From a client's body to requests: what is asked, checked against the model, tokenised, hashed, salted."""

from __future__ import annotations

import secrets
import time
import uuid
from typing import NamedTuple, TypeVar

import msgspec

from services.gateway.models import Model, Models
from services.gateway.openai import ChatBody, CompletionBody, GenerationBody
from shared.errors import BadRequest, PromptTooLong, SlipstreamError
from shared.kv.hashing import block_hashes, chain_seed, keys, public_prefix, tenant_partition, tenant_salt
from shared.messages.request import GenerateRequest
from shared.types import InstanceId, RequestClass, SamplingParams, pack_tokens

N = TypeVar("N", int, float)

CLASSES: dict[str, RequestClass] = {"priority": "high", "flex": "batch", "batch": "batch"}
"""`service_tier` → request class; anything else is normal."""
OPEN_END = "\ue000\uf8ff\ue000"
"""Marks where a message that is to be continued ends: a template goes on behind it. Characters that no text has."""


class Unsupported(SlipstreamError):
    """Asked for what is not built."""

    code = "not_supported"
    status = 501


class Client(NamedTuple):
    """Who asks, and under which trace."""

    tenant: str
    traceparent: str
    """Of the call's own span, whose children the services' spans are."""
    caller: str = ""
    """The caller's own traceparent, as it came."""
    explain: bool = False
    """Whether it wants to know why it is routed where it is."""


class Admitted(NamedTuple):
    """One client call: its requests, one a choice; and what the reply needs."""

    model: Model
    requests: list[GenerateRequest]
    prompts: list[list[int]]
    """One for each `num_choices` requests."""
    num_choices: int
    num_prompt_tokens: int


class Admission:
    """Pure but for tokenising and the clocks. Everything it refuses is refused before a request is minted."""

    def __init__(self, models: Models, gateway: InstanceId, cluster_secret: bytes, deadline_s: float) -> None:
        self._models = models
        self._gateway = gateway
        self._secret = cluster_secret
        self._deadline_s = deadline_s

    async def chat(self, body: ChatBody, client: Client) -> Admitted:
        model = self._models.get(body.model)
        if body.tools and body.tool_choice != "none":
            raise Unsupported("tool calls are not served yet; with tool_choice none the tools are left out")
        if body.top_logprobs is not None and not body.logprobs:
            raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        prompt = await self.chat_prompt(model, body)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        max_tokens = body.max_completion_tokens or body.max_tokens
        return self._admit(body, client, model, [prompt], max_tokens, num_logprobs)

    async def chat_prompt(self, model: Model, body: ChatBody) -> list[int]:
        options = dict(body.chat_template_kwargs or {})
        reserved = {"messages", "bos_token", "eos_token", "unk_token", "pad_token"} & options.keys()
        if reserved:
            raise BadRequest(f"{sorted(reserved)[0]} cannot be set", param="chat_template_kwargs")
        if body.continue_final_message and body.add_generation_prompt:
            raise BadRequest("continue_final_message needs add_generation_prompt: false", param="continue_final_message")
        messages = [message.rendered() for message in body.messages]
        if body.continue_final_message:
            messages[-1]["content"] += OPEN_END
        text = model.tokenizer.render(messages, options | {"add_generation_prompt": body.add_generation_prompt})
        if body.continue_final_message:
            text, found, _ = text.rpartition(OPEN_END)
            if not found:
                raise BadRequest("the chat template does not show the last message: it cannot be continued", param="continue_final_message")
        return await model.tokenizer.encode(text, add_special_tokens=False, max_tokens=model.card.max_model_len)

    async def completion(self, body: CompletionBody, client: Client) -> Admitted:
        model = self._models.get(body.model)
        if body.suffix is not None:
            raise BadRequest("suffix is not served", param="suffix")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise BadRequest("best_of other than n is not served", param="best_of")
        if body.echo and body.logprobs is not None:
            raise Unsupported("echo with logprobs is not served yet")
        prompts = [await self._tokens(model, prompt) for prompt in split_prompts(body.prompt)]
        num_logprobs = -1 if body.logprobs is None else body.logprobs
        return self._admit(body, client, model, prompts, body.max_tokens or 16, num_logprobs)

    async def _tokens(self, model: Model, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return await model.tokenizer.encode(prompt, add_special_tokens=True, max_tokens=model.card.max_model_len)
        check_token_ids(prompt, model.card.vocab_size, "prompt")
        return prompt

    def _admit(
        self, body: GenerationBody, client: Client, model: Model, prompts: list[list[int]], max_tokens: int | None, num_logprobs: int
    ) -> Admitted:
        if (body.response_format or {}).get("type", "text") != "text":
            raise Unsupported("response_format other than text is not served yet")
        if body.stream_options is not None and not body.stream:
            raise BadRequest("stream_options needs stream: true", param="stream_options")
        num_choices = body.n or 1
        sampling = [self._sampling(body, model, prompt, max_tokens, num_logprobs) for prompt in prompts]
        seed = secrets.randbits(62) if body.seed is None else body.seed % 2**63
        requests = [
            self._request(body, client, model, prompt, params, (seed + choice) % 2**63)
            for prompt, params in zip(prompts, sampling, strict=True)
            for choice in range(num_choices)
        ]
        return Admitted(model, requests, prompts, num_choices, sum(map(len, prompts)))

    def _sampling(self, body: GenerationBody, model: Model, prompt: list[int], max_tokens: int | None, num_logprobs: int) -> SamplingParams:
        limit = model.card.max_model_len
        if not prompt:
            raise BadRequest("the prompt is empty", param="prompt" if isinstance(body, CompletionBody) else "messages")
        if len(prompt) + 1 > limit:
            raise PromptTooLong(len(prompt), limit)
        if max_tokens is not None and len(prompt) + max_tokens > limit:
            raise _too_much(len(prompt), max_tokens, limit)
        check_token_ids(body.stop_token_ids or [], model.card.vocab_size, "stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens or limit - len(prompt),
            temperature=_or(body.temperature, 1.0),
            top_k=max(_or(body.top_k, 0), 0),
            top_p=_or(body.top_p, 1.0),
            min_p=_or(body.min_p, 0.0),
            presence_penalty=_or(body.presence_penalty, 0.0),
            frequency_penalty=_or(body.frequency_penalty, 0.0),
            repetition_penalty=_or(body.repetition_penalty, 1.0),
            logit_bias=_logit_bias(body.logit_bias or {}, model.card.vocab_size),
            stop_token_ids=body.stop_token_ids or [],
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens or 0,
            num_logprobs=num_logprobs,
        )

    def _request(
        self, body: GenerationBody, client: Client, model: Model, prompt: list[int], sampling: SamplingParams, seed: int
    ) -> GenerateRequest:
        card, packed = model.card, pack_tokens(prompt)
        salt = tenant_salt(self._secret, client.tenant, body.cache_salt or "")
        public = public_prefix(card.model_digest, salt, packed, card.public_prefixes, card.block_size)
        hashes = block_hashes(chain_seed(card.model_digest, salt), packed, card.block_size, public)
        most_ms, wished_ms = int(self._deadline_s * 1000), body.slipstream.deadline_ms if body.slipstream else None
        return GenerateRequest(
            request_id=mint_request_id(),
            epoch=0,
            gateway=self._gateway,
            model=model.id,
            request_class=CLASSES.get(body.service_tier or "", "normal"),
            token_ids=packed,
            num_emitted=0,
            sampling=msgspec.structs.replace(sampling, seed=seed),
            salt=salt,
            partition=tenant_partition(self._secret, client.tenant),
            block_keys=keys(hashes),
            deadline_ms=min(wished_ms or most_ms, most_ms),
            sent_at_ns=time.time_ns(),
            traceparent=client.traceparent,
            priority=body.priority or 0,
            explain=client.explain,
        )


def mint_request_id() -> str:
    """A UUIDv7 as 32 hex digits: time first, so that ids sort by age."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds << 80) | (0x7 << 76) | (secrets.randbits(12) << 64) | (0b10 << 62) | secrets.randbits(62)
    return uuid.UUID(int=value).hex


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The four forms of `prompt` → prompts. Raises BadRequest for a mixture."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [[part for part in prompt if isinstance(part, int)]]
    if len(kinds) > 1:
        raise BadRequest("prompt mixes texts and token ids", param="prompt")
    if len(prompt) > 128:
        raise BadRequest("at most 128 prompts in one call", param="prompt")
    return [part for part in prompt if not isinstance(part, int)]


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises BadRequest for an id that the model has not."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise BadRequest(f"token ids go from 0 to {vocab_size - 1}", param=param)


def _too_much(num_prompt_tokens: int, max_tokens: int, limit: int) -> PromptTooLong:
    error = PromptTooLong(num_prompt_tokens, limit)
    error.message = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}; together the limit is {limit}"
    error.param = "max_tokens"
    return error


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size for key in bias):
        raise BadRequest(f"keys are token ids from 0 to {vocab_size - 1}", param="logit_bias")
    return {int(key): value for key, value in bias.items()}


def _or(value: N | None, default: N) -> N:
    return default if value is None else value
