"""The model's card: written by workers, with a part that is people's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from shared.bus.base import Bucket
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages.codec import decode, encode
from shared.messages.fleet import ModelCard
from shared.messages.subjects import Subjects
from shared.worker.card import publish_card

SUBJECTS = Subjects()
CARD = ModelCard("m", bytes(32), "/m", 16, 2048, 1000, [2], "default", "float32", "0" * 16, 1024)
KEY = f"model.{CARD.model}"


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    bus = MemoryBus(MemoryBroker())
    yield bus
    await bus.close()


async def bucket_of(bus: MemoryBus) -> Bucket:
    return await bus.bucket(SUBJECTS.bucket("config"))


async def read(bus: MemoryBus) -> ModelCard:
    entry = await (await bucket_of(bus)).get(KEY)
    assert entry is not None
    assert entry.value is not None
    return decode(ModelCard, entry.value)


async def test_the_first_writes_it_and_the_second_finds_it(bus: MemoryBus) -> None:
    assert await publish_card(bus, SUBJECTS, CARD) == CARD
    before = await (await bucket_of(bus)).get(KEY)
    assert await publish_card(bus, SUBJECTS, CARD) == CARD
    assert await (await bucket_of(bus)).get(KEY) == before, "the same is not written again"


async def test_what_changed_is_written_and_declared_prefixes_stay(bus: MemoryBus) -> None:
    declared = msgspec.structs.replace(CARD, public_prefixes=[[1, 2, 3]])
    await (await bucket_of(bus)).create(KEY, encode(declared))
    moved = msgspec.structs.replace(CARD, path="/elsewhere")
    expected = msgspec.structs.replace(moved, public_prefixes=[[1, 2, 3]])
    assert await publish_card(bus, SUBJECTS, moved) == expected
    assert await read(bus) == expected


async def test_what_is_no_card_is_written_anew(bus: MemoryBus) -> None:
    await (await bucket_of(bus)).create(KEY, b"\x80")
    await publish_card(bus, SUBJECTS, CARD)
    assert await read(bus) == CARD
