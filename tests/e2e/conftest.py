"""What the end-to-end tests share: prompts, greedy answers of transformers, and a way to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.config import read_config
from shared.engine.config import EngineConfig
from shared.engine.model.loader import resolve_model

MODEL = "smollm2-135m"
NUM_TOKENS = 16

TEXT = (
    "The harbour lay still in the early light. Two fishing boats had come in before dawn, and their crews were sorting the catch on the "
    "quay while gulls quarrelled above them. A woman in a yellow coat walked along the wall, counting the steps as she always did. "
)
RAW = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "La capitale de l'Allemagne est",
    "Der schnelle braune Fuchs springt",
    "El perro y el gato",
    "1, 1, 2, 3, 5, 8,",
    "今日は天気が",
    "Москва — столица",
    "The three laws of thermodynamics are",
]
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about rain.",
    "Quelle est la capitale de l'Italie ?",
    "Was ist 7 mal 8?",
    "¿Cuántos días tiene un año?",
    "Explain gravity to a child.",
]
LENGTHS = [1, 15, 16, 17, 31, 512, 1500]


class Oracle:
    """transformers on the same weights, in float32, greedy."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answer(self, token_ids: list[int]) -> list[int]:
        """The next tokens, at most `NUM_TOKENS`, up to and without an end token."""
        with torch.inference_mode():
            output = self.model.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=0,
            )
        tokens: list[int] = output[0, len(token_ids) :].tolist()
        ends = self.model.generation_config.eos_token_id
        return [token for token in tokens if token not in (ends if isinstance(ends, list) else [ends])]

    def text(self, token_ids: list[int]) -> str:
        text: str = self.tokenizer.decode(self.answer(token_ids), skip_special_tokens=True)
        return text


@pytest.fixture(scope="session")
def oracle() -> Iterator[Oracle]:
    torch.set_num_threads(2)
    folder = resolve_model(MODEL, read_config(EngineConfig, {}).cache_dir, lambda text, fraction: None)
    yield Oracle(folder.path)


@pytest.fixture(scope="session")
def cases(oracle: Oracle) -> list[tuple[str, dict[str, Any], str]]:
    """(path, body, expected text): 24 prompts, raw by text, raw by token ids of exact lengths, and chat."""
    found: list[tuple[str, dict[str, Any], str]] = []

    def ask(**fields: Any) -> dict[str, Any]:
        return {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}

    for prompt in RAW:
        found.append(("/v1/completions", ask(prompt=prompt), oracle.text(oracle.tokenizer(prompt)["input_ids"])))
    long_ids = oracle.tokenizer(TEXT * 40)["input_ids"]
    for length in LENGTHS:
        found.append(("/v1/completions", ask(prompt=long_ids[:length]), oracle.text(long_ids[:length])))
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        token_ids = oracle.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        found.append(("/v1/chat/completions", ask(messages=messages), oracle.text(token_ids)))
    return found
