"""What clients ask: prompts as token ids, from a shape or from a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.similarity import prompt_of, read_lines
from shared.kv.hashing import block_hashes, keys
from shared.types import pack_tokens

BLOCK_SIZE = 16


class Prompt(NamedTuple):
    """One request, before it has a time."""

    packed: bytes
    block_keys: bytes
    num_output_tokens: int
    session: str = ""
    """If set: it comes when the session's last one has been answered."""

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // 4


def _prompt(token_ids: list[int], num_output_tokens: int) -> Prompt:
    packed = pack_tokens(token_ids)
    return Prompt(packed, keys(block_hashes(bytes(32), packed, BLOCK_SIZE)), num_output_tokens)


def shared_prefix(
    seed: int,
    num_groups: int = 150,
    group_size: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    num_output_tokens: int = 100,
) -> list[Prompt]:
    """Groups that share a prefix, their requests in random order."""
    prompts, _ = shared_prefix_again(seed, num_groups, group_size, prefix_tokens, question_tokens, num_output_tokens)
    return prompts


def shared_prefix_again(
    seed: int,
    num_groups: int = 150,
    group_size: int = 5,
    prefix_tokens: int = 6000,
    question_tokens: int = 1200,
    num_output_tokens: int = 100,
) -> tuple[list[Prompt], list[Prompt]]:
    """The same, and then as many other questions about the same prefixes."""
    generator = random.Random(seed)
    prefixes = [generator.choices(range(49_152), k=prefix_tokens) for _ in range(num_groups)]

    def ask() -> list[Prompt]:
        questions = [prefix + generator.choices(range(49_152), k=question_tokens) for prefix in prefixes for _ in range(group_size)]
        generator.shuffle(questions)
        return [_prompt(question, num_output_tokens) for question in questions]

    return ask(), ask()


def nothing_shared(seed: int, num_prompts: int = 750, num_tokens: int = 7200) -> list[Prompt]:
    return shared_prefix(seed, num_prompts, 1, 0, num_tokens)


def hot_prefix(seed: int, num_prompts: int = 2000) -> list[Prompt]:
    """One prefix for all."""
    return shared_prefix(seed, 1, num_prompts, 2000, 100)


def from_traces(paths: Sequence[Path], num_output_tokens: int = 100) -> list[Prompt]:
    """Text traces, one session a file."""
    sessions = [[prompt_of(line.session_id, line.input) for line in read_lines([path])] for path in paths]
    turns = [(turn, prompt) for session in sessions for turn, prompt in enumerate(session)]
    turns.sort(key=lambda pair: pair[0])  # for whoever takes them one by one: the sessions take turns
    return [Prompt(prompt.packed, prompt.block_keys, num_output_tokens, prompt.session) for _, prompt in turns if prompt.packed]
