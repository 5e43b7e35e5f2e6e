"""Plain data: tokens travel packed, and what is out of range does not get in."""

import math
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import MalformedMessage
from shared.messages.codec import decode, encode
from shared.types import SamplingParams, TokenLogprob, Usage, pack_tokens, unpack_tokens

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=200)


@given(token_lists)
def test_tokens_survive_packing(token_ids: list[int]) -> None:
    packed = pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert unpack_tokens(packed) == token_ids


@given(token_lists, token_lists)
def test_packing_joins_like_lists(first: list[int], second: list[int]) -> None:
    assert pack_tokens(first) + pack_tokens(second) == pack_tokens(first + second)


def test_the_byte_order_is_little_endian_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pack_tokens([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    monkeypatch.setattr(sys, "byteorder", "big" if sys.byteorder == "little" else "little")
    assert unpack_tokens(b"\0\0\0\x01") == [1], "on the other kind of machine the bytes are swapped"


@pytest.mark.parametrize("token_ids", [[-1], [2**32]])
def test_what_is_no_token_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        pack_tokens(token_ids)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5])
def test_a_torn_token_is_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_tokens(b"\0" * num_bytes)


BAD = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 10**9),
    ("max_tokens", 1.5),
    ("temperature", -0.1),
    ("temperature", 101.0),
    ("temperature", math.nan),
    ("temperature", "hot"),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("seed", -1),
    ("seed", 2**63),
    ("stop_token_ids", list(range(65))),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ("num_logprobs", 21),
    ("num_logprobs", -2),
    ("min_tokens", -1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={str(value)[:12]}" for field, value in BAD])
def test_sampling_out_of_range_does_not_arrive(field: str, value: object) -> None:
    params = msgspec.structs.replace(SamplingParams(), **{field: value})
    with pytest.raises(MalformedMessage):
        decode(SamplingParams, encode(params))


def test_defaults_are_small_on_the_wire() -> None:
    assert len(encode(SamplingParams())) < 64
    assert decode(SamplingParams, encode(SamplingParams())) == SamplingParams()


def test_every_field_of_sampling_arrives() -> None:
    params = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
        repetition_penalty=1.1,
        logit_bias={5: -100.0},
        seed=2**62,
        stop_token_ids=[1, 2],
        ignore_eos=True,
        min_tokens=3,
        num_logprobs=5,
    )
    assert decode(SamplingParams, encode(params)) == params


def test_counts_are_not_negative() -> None:
    with pytest.raises(MalformedMessage):
        decode(Usage, encode(Usage(num_prompt_tokens=-1)))


def test_logprobs_arrive() -> None:
    logprob = TokenLogprob(-0.5, [1, 2], [-0.5, -1.5])
    assert decode(TokenLogprob, encode(logprob)) == logprob
