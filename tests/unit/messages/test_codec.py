from __future__ import annotations

import pickle
import random
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import MalformedMessage
from shared.messages.codec import decode, decode_union, encode
from shared.messages.fleet import WorkerLoad
from shared.messages.kv import KvEventBatch, PeerMessage
from shared.messages.request import GenerateRequest
from shared.messages.session import Finish, Progress, TokenBatch, TokenMessage
from tests.support.messages import DELTA, EXAMPLES, REQUEST, message_types

TYPES = message_types()
UNIONS: list[Any] = [TokenMessage, PeerMessage]


class Canary:
    """Unpickled, it would be noticed."""

    woken = False

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("from tests.unit.messages.test_codec import Canary; Canary.woken = True",)


def survives(message_type: Any, payload: bytes) -> None:
    """`payload` is either a message of the type or MalformedMessage; nothing else can happen."""
    try:
        decoded = decode_union(message_type, payload)
    except MalformedMessage as error:
        assert len(error.message) < 400
        assert error.type_name
    else:
        assert isinstance(decoded, msgspec.Struct)


@given(st.sampled_from([*TYPES, *UNIONS]), st.binary(max_size=200))
@settings(max_examples=400, deadline=None)
def test_random_bytes(message_type: Any, payload: bytes) -> None:
    survives(message_type, payload)


@given(st.sampled_from(EXAMPLES), st.data())
@settings(max_examples=400, deadline=None)
def test_damaged_messages(example: msgspec.Struct, data: st.DataObject) -> None:
    payload = bytearray(encode(example))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    survives(type(example), bytes(payload))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: type(each).__name__)
def test_every_truncation(example: msgspec.Struct) -> None:
    payload = encode(example)
    for length in range(len(payload)):
        with pytest.raises(MalformedMessage):
            decode(type(example), payload[:length])
    with pytest.raises(MalformedMessage):
        decode(type(example), payload + b"\x00")


@pytest.mark.parametrize("message_type", TYPES, ids=lambda each: each.__name__)
def test_every_other_message(message_type: type[msgspec.Struct]) -> None:
    for example in EXAMPLES:
        if type(example) is message_type:
            continue
        if message_type.__struct_config__.tag is not None or type(example).__struct_config__.tag is not None:
            with pytest.raises(MalformedMessage):
                decode(message_type, encode(example))
        else:
            survives(message_type, encode(example))


NASTY = {
    "empty": b"",
    "nil": b"\xc0",
    "deep arrays": b"\x91" * 200_000,
    "deep maps": b"\x81\xa1a" * 100_000,
    "deep inside": encode(REQUEST)[:12] + b"\x91" * 200_000,
    "array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "map of 4 billion": b"\xdf\xff\xff\xff\xff",
    "string of 4 billion": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 billion": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc7\x08\x05" + b"x" * 8,
    "reserved byte": b"\xc1",
    "pickle": pickle.dumps(Canary()),
    "json": b'{"request_id": "x"}',
    "a million nils": b"\xdc\xff\xff" + b"\xc0" * 65_535,
    "invalid utf-8": b"\x92\xa8generate\xa2\xff\xfe",
}


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("message_type", [GenerateRequest, TokenBatch, Finish, WorkerLoad, KvEventBatch, TokenMessage], ids=str)
def test_nasty_bytes(message_type: Any, name: str) -> None:
    tracemalloc.start()
    with pytest.raises(MalformedMessage):
        decode_union(message_type, NASTY[name])
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2**20
    assert not Canary.woken


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("request_id", "0192F3A4B5C6D7E8F9A0B1C2D3E4F5A6"),
    ("request_id", "0192f3a4b5c6d7e8f9a0b1c2d3e4f5a6\n"),
    ("request_id", "../../etc/passwd"),
    ("epoch", -1),
    ("epoch", 1001),
    ("epoch", True),
    ("epoch", 1.0),
    ("epoch", "1"),
    ("gateway", "ab.cd.ef"),
    ("gateway", "*"),
    ("model", ">"),
    ("request_class", "urgent"),
    ("token_ids", b"x" * (4 * 2**20 + 1)),
    ("token_ids", "text"),
    ("num_emitted", -1),
    ("num_emitted", 2**41),
    ("salt", b"short"),
    ("block_keys", b"x" * (16 * 2**16 + 1)),
    ("deadline_ms", -1),
    ("traceparent", "0" * 65),
    ("priority", 1001),
]


@pytest.mark.parametrize(("field", "value"), OUT_OF_RANGE, ids=[f"{field}-{number}" for number, (field, _) in enumerate(OUT_OF_RANGE)])
def test_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(GenerateRequest, encode(msgspec.structs.replace(REQUEST, **{field: value})))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -0.5, 1e300])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
def test_sampling_takes_no_odd_numbers(field: str, number: float) -> None:
    sampling = msgspec.structs.replace(REQUEST.sampling, **{field: number})
    with pytest.raises(MalformedMessage):
        decode(GenerateRequest, encode(msgspec.structs.replace(REQUEST, sampling=sampling)))


def test_a_union_tells_its_members_apart() -> None:
    batch, progress = TokenBatch("cccccccc", [DELTA]), Progress("cccccccc", "decode", [])
    assert decode_union(TokenMessage, encode(batch)) == batch
    assert decode_union(TokenMessage, encode(progress)) == progress
    with pytest.raises(MalformedMessage):
        decode_union(TokenMessage, encode(REQUEST))


def test_no_content_in_the_error() -> None:
    """What a malformed message contained may be a prompt."""
    secret = "a very secret prompt"
    with pytest.raises(MalformedMessage) as caught:
        decode(GenerateRequest, encode(msgspec.structs.replace(REQUEST, gateway=secret)))
    assert secret not in str(caught.value)


def test_noise(seed: int = 11) -> None:
    """10,000 messages of noise with plausible beginnings."""
    noise = random.Random(seed)
    beginnings = [encode(example)[: noise.randrange(1, 20)] for example in EXAMPLES]
    for _ in range(10_000):
        payload = noise.choice(beginnings) + noise.randbytes(noise.randrange(64))
        survives(noise.choice(TYPES), payload)
    survives(WorkerLoad, struct.pack(">BI", 0xDD, 2**31) + b"\x00" * 1000)
