"""Both streams of text, on the bundled model's tokenizer: whatever the tokens and their pieces, the plain decode of them all."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models

from services.gateway.detokenizer import ByteStream, DecodedStream, TextStream, TokenBytes, is_byte_level
from shared.engine.model.loader import ModelFolder

Make = Callable[[], TextStream]
TEXTS = ("Bonjour, héllo wörld", "日本語のテキストです。", "🎉 party 🏳️‍🌈 flags 👩‍👩‍👧", "ünïcödé\n\ttabs  and   spaces ", "العربية עברית")


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder: ModelFolder) -> HfTokenizer:
    return HfTokenizer.from_file(str(smollm2_folder.path / "tokenizer.json"))


@pytest.fixture(scope="module", params=["bytes", "decoder"])
def make(request: pytest.FixtureRequest, tokenizer: HfTokenizer) -> Make:
    token_bytes = TokenBytes(tokenizer)
    return (lambda: ByteStream(token_bytes)) if request.param == "bytes" else (lambda: DecodedStream(tokenizer))


def shown(stream: TextStream, token_ids: list[int], sizes: random.Random) -> str:
    text, at = "", 0
    while at < len(token_ids):
        size = sizes.randrange(1, 5)
        text += stream.push(token_ids[at : at + size])
        at += size
    return text + stream.rest()


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_many_languages_cut_anywhere(make: Make, tokenizer: HfTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text * 3).ids
    for end in range(1, len(token_ids) + 1):
        assert shown(make(), token_ids[:end], random.Random(end)) == tokenizer.decode(token_ids[:end])


@given(token_ids=st.lists(st.integers(0, 49_151), max_size=40), seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_any_tokens_even_such_as_are_no_text(make: Make, tokenizer: HfTokenizer, token_ids: list[int], seed: int) -> None:
    assert shown(make(), token_ids, random.Random(seed)) == tokenizer.decode(token_ids)


def test_half_a_character_is_held_back(make: Make, tokenizer: HfTokenizer) -> None:
    stream = make()
    for token_id in tokenizer.encode("🎉🦜").ids:
        assert "\ufffd" not in stream.push([token_id])


def test_special_tokens_are_not_shown(make: Make, tokenizer: HfTokenizer) -> None:
    end = tokenizer.token_to_id("<|im_end|>")
    assert make().push([*tokenizer.encode("a").ids, end, *tokenizer.encode("b").ids]) == "ab"


def test_a_byte_level_decoder_and_no_other_is_taken_for_one(tokenizer: HfTokenizer) -> None:
    assert is_byte_level(tokenizer)
    other = HfTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert not is_byte_level(other)
    other.decoder = decoders.Metaspace()
    assert not is_byte_level(other)
