"""The model card that a worker puts into ss_config."""

from __future__ import annotations

import logging

import msgspec

from shared.bus.base import Bus
from shared.engine.engine import EngineSpec
from shared.errors import MalformedMessage, RevisionConflict
from shared.messages.codec import decode, encode
from shared.messages.fleet import ModelCard
from shared.messages.subjects import Subjects

log = logging.getLogger(__name__)


def card_of(spec: EngineSpec) -> ModelCard:
    """What clients, gateways and routers must know of the model."""
    return ModelCard(
        name=spec.model_name,
        model_digest=spec.model_digest,
        path=spec.model_path,
        block_size=spec.layout.block_size,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        numerics=spec.numerics,
        dtype=spec.dtype,
        layout=spec.layout.digest,
        block_bytes=spec.layout.block_bytes,
    )


async def publish_card(bus: Bus, subjects: Subjects, card: ModelCard) -> ModelCard:
    """Create the card, or bring it up to date, and return it as it stands. The public prefixes in it are people's, not the workers': they
    are kept. Workers of one model write the same; who comes second finds it there."""
    bucket = await bus.bucket(subjects.bucket("config"))
    key = f"model.{card.model}"
    entry = await bucket.get(key)
    if entry is not None and entry.value is not None:
        card = msgspec.structs.replace(card, public_prefixes=_declared(entry.value))
    value = encode(card)
    try:
        if entry is None:
            await bucket.create(key, value)
        elif entry.value != value:
            await bucket.update(key, value, entry.revision)
    except RevisionConflict:
        log.info("the card of %s was written by another worker at the same time", card.name)
    return card


def _declared(value: bytes) -> list[list[int]]:
    """The public prefixes of the card that is there; none if it cannot be read."""
    try:
        return decode(ModelCard, value).public_prefixes
    except MalformedMessage as error:
        log.warning("the model card that is there cannot be read, it is written anew: %s", error)
        return []
