"""Bodies: what is taken from them, what is refused, and that no body costs more than it must."""

from __future__ import annotations

import gc

import msgspec
import pytest

from services.gateway.openai import MAX_DETOKENIZED, ChatBody, CompletionBody, DetokenizeBody, parse_body
from shared.errors import BadRequest

MESSAGES = b'"messages":[{"role":"user","content":"x"}]'


def test_fields_without_effect_are_named_in_their_order() -> None:
    body, unknown = parse_body(ChatBody, b'{"zeta":1,"model":"m","user":"u","alpha":{"a":[]},' + MESSAGES + b"}")
    assert (body.model, unknown) == ("m", ["zeta", "user", "alpha"])
    packed = msgspec.msgpack.encode({"zeta": 1, "model": "m", "prompt": "x", "alpha": 2})
    assert parse_body(CompletionBody, packed, is_msgpack=True)[1] == ["zeta", "alpha"]


def test_of_fields_that_come_twice_the_last_is_taken() -> None:
    body, unknown = parse_body(ChatBody, b'{"model":"a","x":1,"n":2,"model":"b","x":2,"n":3,' + MESSAGES + b"}")
    assert (body.model, body.n, unknown) == ("b", 3, ["x"])


@pytest.mark.parametrize("body", [b'{"model":1}', b"{", b'{"a":' * 100_000, b"[]", b"\xff", b'{"model":"m",' + MESSAGES + b',"x":nul}'])
def test_the_garbage_collector_runs_again_behind_a_bad_body(body: bytes) -> None:
    with pytest.raises(BadRequest):
        parse_body(ChatBody, body)
    assert gc.isenabled()


def test_a_million_little_objects_are_not_looked_at_again_and_again() -> None:
    body = b'{"model":"m",' + MESSAGES + b',"tools":[' + b",".join([b"{}"] * 1_000_000) + b"]}"
    before = [generation["collections"] for generation in gc.get_stats()]
    parsed, _ = parse_body(ChatBody, body)
    after = [generation["collections"] for generation in gc.get_stats()]
    assert len(parsed.tools or []) == 1_000_000
    assert sum(after) - sum(before) < 10
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("field", "error"),
    [
        (b'"n":1e3', "n"), (b'"n":18446744073709551616', "n"), (b'"n":true', "n"), (b'"max_tokens":1e999', "max_tokens"),
        (b'"max_tokens":' + b"9" * 5000, "max_tokens"), (b'"max_tokens":1.0', "max_tokens"), (b'"seed":9223372036854775808', "seed"),
        (b'"top_k":-2', "top_k"), (b'"priority":' + b"9" * 40, "priority"), (b'"stream":1', "stream"), (b'"tools":{}', "tools"),
        (b'"stop_token_ids":[4294967296]', "stop_token_ids"), (b'"logit_bias":{"1":' + b"9" * 5000 + b"}", "logit_bias"),
    ],
)  # fmt: skip
def test_numbers_at_their_extremes_are_refused_by_name(field: bytes, error: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse_body(ChatBody, b'{"model":"m",' + MESSAGES + b"," + field + b"}")
    assert (refused.value.param or "").startswith(error)


def test_no_more_messages_and_tokens_than_can_be_meant() -> None:
    many = b'{"model":"m","messages":[' + b",".join([b'{"role":"user","content":"x"}'] * 10_000) + b"]}"
    with pytest.raises(BadRequest, match="1024"):
        parse_body(ChatBody, many)
    with pytest.raises(BadRequest, match=str(MAX_DETOKENIZED)):
        parse_body(DetokenizeBody, msgspec.json.encode({"tokens": [1] * (MAX_DETOKENIZED + 1)}))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{" + MESSAGES + b',"model":"m","max_tokens":-1}', "max_tokens: expected int >= 1"),
        (b"{" + MESSAGES + b"}", "field model is required"),
        (b'{"model":"m","messages":[1]}', "messages[0]: expected object, got int"),
        (b'{"model":"m","messages":[{"role":"user","content":[{"type":"text"}]}]}', "messages[0].content[0]: field text is required"),
        (b"[]", "the body: expected object, got array"),
        (b'{"model": NaN}', "the body is not valid JSON: invalid character (byte 10)"),
        (b'{"a":' * 100_000, "the body is not valid JSON: it is nested too deeply"),
        (b"{", "the body is not valid JSON: input data was truncated"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(body: bytes, message: str) -> None:
    """Over NATS, and in most clients, the message is all that is seen."""
    with pytest.raises(BadRequest) as refused:
        parse_body(ChatBody, body)
    assert refused.value.message == message


def test_a_value_is_not_sent_back_at_length() -> None:
    with pytest.raises(BadRequest) as refused:
        parse_body(ChatBody, b'{"model":"m","messages":[{"role":"' + b"x" * 1_000_000 + b'"}]}')
    assert len(refused.value.message) < 300
