"""What stands where a prompt begins to differ from the earlier ones: its kind, never its text. Pure but for what it remembers.

The router knows that a prompt left the known path; only here is there a tokenizer to see what it stumbled over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from shared.kv.hashing import split
from shared.types import KEY_BYTES

Kind = Literal["time", "id", "tools", "number", "text"]
Place = Literal["beginning", "later"]

MAX_KEYS = 2**17
"""Blocks remembered, the newest: two million tokens at 16 a block, some 20 MB."""
_LEAD_TOKENS = 8
"""Looked at before the block that differs: a date may begin in the block before."""
_BEGINNING_TOKENS = 48

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_KINDS: list[tuple[Kind, re.Pattern[str]]] = [
    ("id", re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-|\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{12,}", re.IGNORECASE)),
    (
        "time",
        re.compile(
            rf"\d{{4}}-\d\d-|\d?\d:\d\d|\d?\d/\d?\d/\d\d|\b{_MONTH}\.? \d|\d (?:of )?{_MONTH}\b"
            r"|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b|\b1[5-9]\d{8}",
            re.IGNORECASE,
        ),
    ),
    ("tools", re.compile(r'"(?:function|parameters|properties|description|input_schema)"\s*:')),
    ("number", re.compile(r"\d{3}")),
]


class Fork(NamedTuple):
    """`num_tokens` of the prompt stand behind it, and cannot be reused because of it."""

    place: Place
    kind: Kind
    num_tokens: int


class Forks:
    """Remembers the blocks of this gateway's prompts, by keys that are salted with their tenant and model."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys // 2
        self._new: dict[bytes, bool] = {}
        """Key → whether another block has followed it. The older half is `_old`."""
        self._old: dict[bytes, bool] = {}

    def see(self, block_keys: bytes, token_ids: Sequence[int], block_size: int, decode: Callable[[Sequence[int]], str]) -> Fork | None:
        """Where a prompt leaves the others. None: it does not; it goes on where one ended; it is too short, or nothing is remembered."""
        keys = split(block_keys, KEY_BYTES)
        is_first = not self._new and not self._old
        known = next((at for at, key in enumerate(keys) if key not in self._new and key not in self._old), len(keys))
        goes_on = known > 0 and not self._is_followed(keys[known - 1])
        self._remember(keys)
        if known == len(keys) or is_first or goes_on:
            return None
        at = known * block_size
        window = token_ids[max(at - _LEAD_TOKENS, 0) : at + block_size] if at else token_ids[:_BEGINNING_TOKENS]
        return Fork("later" if at else "beginning", kind_of(decode(window)), len(token_ids) - at)

    def _is_followed(self, key: bytes) -> bool:
        return self._new.get(key, False) or self._old.get(key, False)

    def _remember(self, keys: Sequence[bytes]) -> None:
        if len(self._new) + len(keys) > self._max_keys:
            self._old, self._new = self._new, {}
        for at, key in enumerate(keys):
            self._new[key] = at + 1 < len(keys) or self._is_followed(key)


def kind_of(text: str) -> Kind:
    """Of some 20 tokens around the place."""
    return next((kind for kind, pattern in _KINDS if pattern.search(text)), "text")
