"""What the end-to-end tests share: prompts and what transformers answers to them, greedy and in float32 (tests/support/oracle.json)."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from shared.engine.config import EngineConfig
from shared.engine.model.loader import resolve_model
from tests.support.model_fixture import MODEL
from tests.support.oracle import load_oracle


@pytest.fixture(scope="session")
def cases() -> list[tuple[str, dict[str, Any], str]]:
    """(path, body, expected text): raw prompts of exact lengths, short ones in several languages, and chats."""
    folder = resolve_model(MODEL, EngineConfig().cache_dir, lambda text, fraction: None).path
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found: list[tuple[str, dict[str, Any], str]] = []
    for prompt in load_oracle():
        path = "/v1/chat/completions" if prompt.messages else "/v1/completions"
        asked = {"messages": prompt.messages} if prompt.messages else {"prompt": prompt.text}
        body = {"model": MODEL, "max_tokens": len(prompt.output), "temperature": 0, **asked}
        found.append((path, body, tokenizer.decode(prompt.output, skip_special_tokens=True)))
    return found
