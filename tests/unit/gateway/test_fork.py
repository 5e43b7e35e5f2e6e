"""Where a prompt leaves the earlier ones, and what kind of text stands there."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.fork import MAX_BLOCKS, Decode, Fork, Forks
from shared.kv.hashing import block_hashes, keys
from shared.messages.request import GenerateRequest
from shared.types import SamplingParams, pack_tokens

BLOCK = 4


def decode(token_ids: Sequence[int]) -> str:
    """A token is a letter, but for the one that is a date."""
    return "".join("2026-12-01" if token == 99 else chr(97 + token % 26) for token in token_ids)


def spelled(token_ids: Sequence[int]) -> str:
    """A token is its character."""
    return "".join(map(chr, token_ids))


class Rig:
    def __init__(self, max_keys: int = 1000) -> None:
        self.forks = Forks(max_keys)
        self.num_decoded: list[int] = []

    def see(self, token_ids: list[int], salt: bytes = bytes(32), seed: bytes = b"", decode: Decode = decode) -> Fork | None:
        """`seed`: of the chain, if it is not the tenant's, as with a public prefix."""

        def counted(ids: Sequence[int]) -> str:
            self.num_decoded.append(len(ids))
            return decode(ids)

        packed = pack_tokens(token_ids)
        block_keys = keys(block_hashes(seed or salt, packed, BLOCK))
        request = GenerateRequest(
            "cd" * 16, 0, "0" * 8, "0" * 16, "normal", packed, 0, SamplingParams(), salt, "0" * 16, block_keys, 10_000, 0
        )
        return self.forks.see(request, BLOCK, counted)

    def read(self, text: str) -> Fork | None:
        return self.see([*map(ord, text)], decode=spelled)


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
    assert rig.see(SAME[::-1], salt=b"b" * 32) is None, "nobody else is there"
    public = b"p" * 32
    rig.see(SAME, salt=b"a" * 32, seed=public)
    rig.see(SAME[:4], salt=b"b" * 32, seed=public)
    assert rig.see([*SAME[:4], 99, 1, 1, 1], salt=b"b" * 32, seed=public) is None, "only the other one has gone on from the public block"


def test_a_blank_and_another_order_are_told_with_what_stands_behind_them() -> None:
    rig = Rig()
    rules = "Answer in plain words, and shortly. "
    first, second = '{"name": "sum", "strict": true}', '{"name": "product", "strict": false}'
    rig.read(f"{rules}You have [{first}, {second}]. Go on.")
    blank = f"{rules[:-1]}\nYou have [{first}, {second}]. Go on."
    assert rig.read(blank) == Fork("later", "whitespace", len(blank) - 32)
    [swapped, keyed] = [
        f"{rules}You have [{second}, {first}]. Go on.",
        f'{rules}You have [{{"strict": true, "name": "sum"}}, {second}]. Go on.',
    ]
    assert rig.read(swapped) == Fork("later", "order", len(swapped) - 56)
    assert rig.read(keyed) == Fork("later", "order", len(keyed) - 48)
    assert rig.read(f"{rules}You have nothing today. Go on.") == Fork("later", "text", 22)


def test_what_a_prompt_costs_is_bounded() -> None:
    rig = Rig(max_keys=100_000)
    long = [ord('"')] * BLOCK * MAX_BLOCKS * 2
    rig.see([1, *long], decode=spelled)
    rig.see([2, *long], decode=spelled)
    rig.see([2, *long[:5000], 3, *long], decode=spelled)
    assert len(rig.num_decoded) == 10 and max(rig.num_decoded) <= 1024
    assert rig.see([2, *long[:-1], 3, *long], decode=spelled) is None, "too far behind to be seen"


def test_what_is_remembered_is_bounded() -> None:
    rig = Rig(max_keys=64)
    for number in range(100):
        rig.see([number, *SAME, 1, 2, 3])
    assert len(rig.forks._new) + len(rig.forks._old) <= 64
    assert rig.see([99, *SAME, 1, 2, 3]) is None, "the newest"
    assert rig.see([0, *SAME, 1, 2, 3]) is not None
