"""What kind of text differs between a prompt and an earlier one that began alike. Pure; never says the text itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

Kind = Literal["whitespace", "order", "time", "id", "tools", "number", "text"]

MAX_CHARS = 8192
"""Looked at of a text: a token may be long."""
MAX_DEPTH = 32
"""Of JSON that is looked at."""
MAX_VALUES = 16
"""Of JSON, likewise."""
ALIKE_CHARS = 12
"""So many must follow a difference in blanks unchanged before it is called one."""

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
_BRACKETS = re.compile(r'[{}\[\]]|"(?:[^"\\\n]|\\.)*+"?')
"""What opens and closes a JSON value, and strings, so that brackets in them are passed over. Nothing is looked at twice."""


class _Value(NamedTuple):
    """A JSON object in a text that lies in no other."""

    begins: int
    canonical: str
    """The same for values that differ in the order of keys, or of the objects of an array."""


def kind_of(text: str) -> Kind:
    """Of some 20 tokens around the place."""
    return next((kind for kind, pattern in _KINDS if pattern.search(text)), "text")


def differs_in_blanks(ours: str, theirs: str) -> bool:
    """Whether spaces and line breaks are all that differs, as far as both texts go."""
    at = num_common(ours, theirs)
    if at == min(len(ours), len(theirs)) or not (ours[at].isspace() or theirs[at].isspace()):
        return False
    one, other = ("".join(text[at:MAX_CHARS].split()) for text in (ours, theirs))
    length = min(len(one), len(other))
    return length >= ALIKE_CHARS and one[:length] == other[:length]


def differs_in_order(ours: str, theirs: str) -> bool:
    """Whether the texts part within JSON that says the same: keys in another order, or objects (tools) in another order."""
    at = num_common(ours, theirs)
    starts = (0, ours.find('"', 0, at) + 1)  # the texts may begin within a string
    return any(_is_reordered([*_values(ours[:MAX_CHARS], start, at)], [*_values(theirs[:MAX_CHARS], start, at)], at) for start in starts)


def _is_reordered(ours: list[_Value], theirs: list[_Value], at: int) -> bool:
    if not ours or not theirs or ours[0].begins > at or theirs[0].begins > at:
        return False
    (our_first, *our_rest), (their_first, *their_rest) = ([one.canonical for one in values] for values in (ours, theirs))
    return our_first == their_first or (our_first in their_rest and their_first in our_rest)


def num_common(ours: str, theirs: str) -> int:
    """Characters that both begin with."""
    low, high = 0, min(len(ours), len(theirs))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ours[low:middle] == theirs[low:middle] else (low, middle - 1)
    return low


def _values(text: str, start: int, after: int) -> Iterator[_Value]:
    """Those behind `start` that end behind `after`. What is cut off at either end is passed over: the values within it count."""
    spans: list[tuple[int, int]] = []
    opened: list[int] = []
    for found in _BRACKETS.finditer(text, start):
        if found[0] in "{[":
            opened.append(found.start())
        elif found[0] in "}]" and opened:
            begins = opened.pop()
            if text[begins] == "[":
                continue  # one list may be whole and the other cut off: their objects are compared
            while spans and spans[-1][0] > begins:
                spans.pop()
            spans.append((begins, found.end()))
    for begins, ends in [span for span in spans if span[1] > after][:MAX_VALUES]:
        if canonical := _canonical(text[begins:ends]):
            yield _Value(begins, canonical)


def _canonical(text: str) -> str:
    """Empty: no JSON, or too deep."""
    try:
        return _written(json.loads(text), MAX_DEPTH)
    except (ValueError, RecursionError):
        return ""


def _written(value: Any, depth: int) -> str:
    if depth == 0:
        raise ValueError("too deep")
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(key)}:{_written(item, depth - 1)}' for key, item in value.items()))}}}"
    if isinstance(value, list):
        items = [_written(item, depth - 1) for item in value]
        return f"[{','.join(sorted(items) if all(isinstance(item, dict) for item in value) else items)}]"
    return json.dumps(value)
