"""The bytes of every message are fixed. A new field goes to the end, with a default; everything else is a new tag and a new subject.

After such an addition write the new lines: `python -m tests.unit.messages.test_golden`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.messages.codec import decode, encode
from tests.support.messages import EXAMPLES, message_types

GOLDEN = Path(__file__).parent / "golden.txt"
NAMES = [type(example).__name__ for example in EXAMPLES]


def read_golden() -> dict[str, str]:
    return dict(line.split() for line in GOLDEN.read_text().splitlines())


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_bytes_on_the_wire(example: msgspec.Struct) -> None:
    golden = bytes.fromhex(read_golden()[type(example).__name__])
    assert encode(example) == golden
    assert decode(type(example), golden) == example
    assert decode(type(example), memoryview(golden)) == example


def test_every_message_has_one_example() -> None:
    assert sorted(NAMES) == sorted(message_type.__name__ for message_type in message_types())
    assert sorted(read_golden()) == sorted(NAMES)


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_example_sets_every_field(example: msgspec.Struct) -> None:
    for field in msgspec.structs.fields(example):
        if field.default is not msgspec.NODEFAULT:
            assert getattr(example, field.name) != field.default, field.name


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_an_older_and_a_newer_sender(example: msgspec.Struct) -> None:
    """One that knows no field with a default yet, and one that knows a field more."""
    items = msgspec.msgpack.decode(encode(example))
    fields = msgspec.structs.fields(example)
    num_tags = len(items) - len(fields)
    num_required = sum(field.required for field in fields)
    older = decode(type(example), msgspec.msgpack.encode(items[: num_tags + num_required]))
    for field in fields:
        if field.required:
            assert getattr(older, field.name) == getattr(example, field.name)
        elif field.default is not msgspec.NODEFAULT:
            assert getattr(older, field.name) == field.default
    assert decode(type(example), msgspec.msgpack.encode([*items, "a field of tomorrow"])) == example


@pytest.mark.parametrize("message_type", message_types(), ids=lambda each: each.__name__)
def test_a_message_is_frozen_tagged_and_explained(message_type: type[msgspec.Struct]) -> None:
    config = message_type.__struct_config__
    assert config.frozen
    assert config.array_like
    assert message_type.__doc__


def test_tags_are_unique() -> None:
    tags = [each.__struct_config__.tag for each in message_types() if each.__struct_config__.tag is not None]
    assert len(tags) == len(set(tags))


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{type(example).__name__} {encode(example).hex()}\n" for example in EXAMPLES))
