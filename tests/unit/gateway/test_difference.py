"""What kind of text differs: each kind by example, and by property what stays the same but for its order or its blanks."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.gateway.difference import ALIKE_CHARS, MAX_CHARS, MAX_DEPTH, differs_in_blanks, differs_in_order, kind_of, num_common

TEXTS = st.text('ab {}[]"\\\n:,é', max_size=60)
LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
OBJECTS = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=12
)
TOOLS = st.lists(st.dictionaries(st.text(max_size=6), OBJECTS, min_size=2, max_size=4), min_size=1, max_size=4)


def shuffled(value: Any, random: Random) -> Any:
    """The same, with keys and objects in any order."""
    if isinstance(value, dict):
        return dict(random.sample([(key, shuffled(item, random)) for key, item in value.items()], len(value)))
    if isinstance(value, list):
        items = [shuffled(item, random) for item in value]
        return random.sample(items, len(items)) if all(isinstance(item, dict) for item in items) else items
    return value


@given(TEXTS, TEXTS, TEXTS)
def test_the_first_difference_is_found(common: str, one: str, other: str) -> None:
    ours, theirs = common + one, common + other
    at = num_common(ours, theirs)
    assert ours[:at] == theirs[:at] and at >= len(common)
    assert ours[at : at + 1] != theirs[at : at + 1] or ours == theirs


@given(TOOLS, st.randoms(use_true_random=False))
def test_another_order_is_recognized_wherever_it_stands(tools: Any, random: Random) -> None:
    ours, theirs = json.dumps(tools), json.dumps(shuffled(tools, random))
    assume(ours != theirs)
    assert differs_in_order(f"Tools: {ours} end", f"Tools: {theirs} end")


@given(TOOLS, st.data())
def test_another_content_is_no_other_order(tools: list[dict[str, Any]], data: st.DataObject) -> None:
    changed = json.loads(json.dumps(tools))
    key = data.draw(st.sampled_from(sorted(changed[0])))
    changed[0][key] = "only here, nowhere else"
    assert not differs_in_order(f"Tools: {json.dumps(tools)} end", f"Tools: {json.dumps(changed)} end")


@given(st.text("abc ", min_size=30, max_size=60), st.integers(0, 20), st.sampled_from([" ", "\n", "\n\n  "]))
def test_blanks_are_recognized(text: str, at: int, blank: str) -> None:
    ours, theirs = text[:at] + blank + text[at:], text
    part = num_common(ours, theirs)
    assume(len("".join(theirs[part:].split())) >= ALIKE_CHARS and ours != theirs)
    assume(ours[part].isspace() or theirs[part].isspace())
    assert differs_in_blanks(ours, theirs) and differs_in_blanks(theirs, ours)
    assert not differs_in_blanks(f"{ours}x", f"{theirs}y")


@given(TEXTS, TEXTS)
def test_whatever_is_compared_has_an_answer_that_knows_no_sides(ours: str, theirs: str) -> None:
    assert differs_in_blanks(ours, theirs) == differs_in_blanks(theirs, ours)
    assert differs_in_order(ours, theirs) == differs_in_order(theirs, ours)
    assert not differs_in_blanks(ours, ours) and not differs_in_order(ours, ours)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_order"),
    [
        ('say {"a": 1, "b": 2} now', 'say {"b": 2, "a": 1} now', True),
        ('{"a": [1, 2], "b": 2}', '{"b": 2, "a": [2, 1]}', False),
        ('1": {"a": 1}, "y": {"b": 2}, {"c', '1": {"b": 2}, "x": {"a": 1}, {"d', True),
        ('{"a": "}{", "b": 2}', '{"b": 2, "a": "}{"}', True),
        ('{"a": 1} then {"b": 2}', '{"a": 1} after {"b": 2}', False),
        ("no JSON", "none here", False),
        ("[" * 9000, "[" * 8999 + "]", False),
    ],
)
def test_orders(ours: str, theirs: str, is_order: bool) -> None:
    assert differs_in_order(ours, theirs) is is_order


def test_what_is_too_deep_or_too_long_is_left_alone() -> None:
    one, other = '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'
    depth = MAX_DEPTH
    assert not differs_in_order('{"c":' * depth + one + "}" * depth, '{"c":' * depth + other + "}" * depth)
    assert not differs_in_order(" " * MAX_CHARS + one, " " * MAX_CHARS + other)
    assert not differs_in_blanks("x" * MAX_CHARS + " " + "y" * 99, "x" * MAX_CHARS + "y" * 99)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Today is 2026-12-01.", "time"),
        ("the time is 9:41 pm", "time"),
        ("on Tuesday, we", "time"),
        ("dated Dec 1, so", "time"),
        ("the 3rd of May", "text"),
        ("on 3 May we", "time"),
        ("due 12/24/26", "time"),
        ("at 1796140000123 ms", "time"),
        ("user 0b8f7c1e-3d2a-4c55-9a", "id"),
        ("commit 9fd43dbe1cb9e6e0", "id"),
        ('{"type": "function", "function": {"name"', "tools"),
        ("order no. 48213", "number"),
        ("may I ask, on sundry things, in 12 words", "text"),
        ("", "text"),
    ],
)
def test_kinds(text: str, kind: str) -> None:
    assert kind_of(text) == kind
