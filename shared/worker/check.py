"""Whether a request can be worked on at all. Gateways check what clients send; this is against broken and foreign senders."""

from __future__ import annotations

from shared.engine.engine import EngineSpec
from shared.errors import BadRequest, PromptTooLong, RequestError
from shared.messages.request import GenerateRequest
from shared.types import unpack_tokens

TOKEN_BYTES = 4


def fault_of(request: GenerateRequest, spec: EngineSpec) -> RequestError | None:
    """Why the request cannot be worked on; None: it can. One such in a batch would be every other's fault."""
    if len(request.token_ids) % TOKEN_BYTES:
        return BadRequest("the token ids are cut off")
    if request.num_prompt_tokens < 1:
        return BadRequest("the prompt is empty")
    if request.num_prompt_tokens >= spec.max_model_len:
        return PromptTooLong(request.num_prompt_tokens, spec.max_model_len)
    if request.num_tokens > spec.max_model_len:
        return BadRequest("the tokens so far are more than the model's context")
    if max(unpack_tokens(request.token_ids)) >= spec.vocab_size:
        return BadRequest("a token id is not in the model's vocabulary")
    return None
