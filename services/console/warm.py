"""`slipstream up --warm FILE`: typical requests are computed before the stack says ready, so that the first users find their beginnings."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from services.console.endpoint import Endpoint, Refused
from shared.errors import ConfigError

FLAG = "--warm"
MAX_REQUESTS = 10_000
NUM_AT_ONCE = 4
PATIENCE_S = 600.0

Body = dict[str, Any]


def read_requests(path: Path) -> list[tuple[int, Body]]:
    """(line number, body) of each line: a JSON object with `prompt` or `messages`. ConfigError names the line that is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(FLAG, str(path), reason or "cannot be read") from error
    requests = [(number, _body(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(FLAG, str(path), "holds no request", remedy=_EXAMPLE)
    if len(requests) > MAX_REQUESTS:
        raise ConfigError(
            FLAG, str(path), f"holds {len(requests)} requests, the limit is {MAX_REQUESTS}", remedy="50 to 100 typical ones do"
        )
    return requests


_EXAMPLE = 'A line a request: {"messages": [{"role": "system", "content": "You are …"}, {"role": "user", "content": "…"}]}'


def _body(path: Path, number: int, line: str) -> Body:
    try:
        body = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(FLAG, str(path), f"line {number} is no JSON object", remedy=_EXAMPLE) from error
    if not isinstance(body.get("messages"), list) and not isinstance(body.get("prompt"), str):
        raise ConfigError(FLAG, str(path), f"line {number} has neither messages nor prompt", remedy=_EXAMPLE)
    return body


def warm_up(url: str, requests: list[tuple[int, Body]], report: Callable[[str, float], None]) -> str:
    """Compute every prompt, and one token each. Returns what to show; a request that is refused is named, and hinders nothing."""
    endpoint = Endpoint(url, os.environ.get("SS_API_KEY", ""), timeout_s=PATIENCE_S)
    model = endpoint.model()
    refusals: list[str] = []
    num_tokens = num_cached = 0

    def compute(request: tuple[int, Body]) -> dict[str, Any] | Refused:
        path = "/v1/chat/completions" if "messages" in request[1] else "/v1/completions"
        limits = {"max_tokens": 1, "stream": False, "n": 1, "temperature": 0}
        others = {name: value for name, value in request[1].items() if name not in ("max_completion_tokens", "stream_options")}
        try:
            usage: dict[str, Any] = endpoint.post(path, {**others, "model": model, **limits})["usage"]
        except Refused as refusal:
            return refusal
        return usage

    with ThreadPoolExecutor(NUM_AT_ONCE, thread_name_prefix="warm") as threads:
        for done, ((line, _), answer) in enumerate(zip(requests, threads.map(compute, requests), strict=True), 1):
            if isinstance(answer, Refused):
                refusals.append(f"line {line}: {answer.message}")
            else:
                num_tokens += answer["prompt_tokens"]
                num_cached += answer["prompt_tokens_details"]["cached_tokens"]
            report(f"warming {done}/{len(requests)}", done / len(requests))
    told = f"{len(requests) - len(refusals)} prompts warmed, {num_tokens:,} tokens ({num_cached:,} of them shared)"
    return told + (f" · {len(refusals)} refused, first {refusals[0]}" if refusals else "")
