"""Where a prompt leaves the earlier ones, and what kind of text stands there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.gateway.fork import Fork, Forks, kind_of
from shared.kv.hashing import block_hashes, keys
from shared.types import pack_tokens

BLOCK = 4


def decode(token_ids: Sequence[int]) -> str:
    """A token is a letter, but for the one that is a date."""
    return "".join("2026-12-01" if token == 99 else chr(97 + token % 26) for token in token_ids)


class Rig:
    def __init__(self, max_keys: int = 1000) -> None:
        self.forks = Forks(max_keys)

    def see(self, token_ids: list[int], salt: bytes = bytes(32)) -> Fork | None:
        return self.forks.see(keys(block_hashes(salt, pack_tokens(token_ids), BLOCK)), token_ids, BLOCK, decode)


SAME = list(range(12))


def test_the_first_prompt_leaves_nobody() -> None:
    assert Rig().see(SAME) is None


def test_prompts_that_part_later_and_at_once() -> None:
    rig = Rig()
    rig.see([*SAME, 1, 2, 3, 4])
    assert rig.see([*SAME, 99, 2, 3, 4, 5]) == Fork("later", "time", 5)
    assert rig.see([7, 99, *SAME]) == Fork("beginning", "time", 14)
    assert rig.see([8, 7, *SAME]) == Fork("beginning", "text", 14)


def test_a_date_that_begins_in_the_block_before_is_seen() -> None:
    rig = Rig()
    prompt = [0, 1, 2, 99]
    rig.see([*prompt, 4, 5, 6, 7])
    assert rig.see([*prompt, 7, 6, 5, 4]) == Fork("later", "time", 4)


def test_what_goes_on_where_one_ended_has_left_nobody() -> None:
    rig = Rig()
    rig.see([*SAME, 1])
    assert rig.see([*SAME, 1, 99, 3, 4, 5, 6]) is None
    assert rig.see([*SAME, 1, 99, 3, 5, 5, 6]) == Fork("later", "time", 6), "now the first of the two has gone on"


def test_the_same_again_leaves_nobody() -> None:
    rig = Rig()
    rig.see(SAME)
    assert rig.see(SAME) is None
    assert rig.see(SAME[:9]) is None
    assert rig.see([]) is None


def test_tenants_are_apart() -> None:
    rig = Rig()
    rig.see(SAME, salt=b"a" * 32)
    assert rig.see(SAME, salt=b"b" * 32) == Fork("beginning", "text", 12), "as for anybody whose prompt is new"


def test_what_is_remembered_is_bounded() -> None:
    rig = Rig(max_keys=64)
    for number in range(100):
        rig.see([number, *SAME, 1, 2, 3])
    assert len(rig.forks._new) + len(rig.forks._old) <= 64
    assert rig.see([99, *SAME, 1, 2, 3]) is None, "the newest"
    assert rig.see([0, *SAME, 1, 2, 3]) is not None


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
