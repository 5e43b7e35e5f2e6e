"""The models that are served: their cards, and a tokenizer for each."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from services.gateway.tokenizer import Tokenizer
from shared.bus.base import Bus, Entry
from shared.errors import BusClosed, BusError, MalformedMessage, ModelFault, ModelNotFound, NoCapacity
from shared.fleet import Fleet
from shared.messages.codec import decode
from shared.messages.fleet import ModelCard
from shared.messages.subjects import Subjects
from shared.types import ModelId

RETRY_S = 0.5

log = logging.getLogger(__name__)


class Model:
    """A card with its tokenizer."""

    def __init__(self, card: ModelCard, tokenizer: Tokenizer) -> None:
        self.card = card
        self.tokenizer = tokenizer
        self.id = card.model
        self.eos_token_ids = frozenset(card.eos_token_ids)


class Models:
    """Follows the cards in ss_config. A name is served while a decode worker of its card is alive."""

    def __init__(self, bus: Bus, subjects: Subjects, fleet: Fleet, tokenizer_path: Path | None) -> None:
        self._bus = bus
        self._bucket = subjects.bucket("config")
        self._fleet = fleet
        self._tokenizer_path = tokenizer_path
        self._models: dict[str, Model] = {}
        """By key of the bucket."""
        self._tokenizers: dict[str, Tokenizer] = {}
        self.changed = asyncio.Event()

    async def follow(self) -> None:
        """For ever."""
        while True:
            try:
                bucket = await self._bus.bucket(self._bucket)
                async for entry in bucket.watch():
                    if entry.key.startswith("model."):
                        await self._take(entry)
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the model cards cannot be read: %s", error)
            await asyncio.sleep(RETRY_S)

    async def _take(self, entry: Entry) -> None:
        if entry.value is None:
            self._models.pop(entry.key, None)
            return
        try:
            card = decode(ModelCard, entry.value)
            self._models[entry.key] = Model(card, await self._tokenizer(str(self._tokenizer_path or card.path)))
        except (MalformedMessage, ModelFault) as error:
            log.error("a model card cannot be served: %s", error)
            return
        self.changed.set()

    async def _tokenizer(self, folder: str) -> Tokenizer:
        if folder not in self._tokenizers:
            self._tokenizers[folder] = await asyncio.to_thread(Tokenizer, Path(folder))
        return self._tokenizers[folder]

    def served(self) -> list[Model]:
        """Models with a decode worker, best known first: one a name."""
        alive = {lease.model for lease in self._fleet.workers("decode")}
        by_name = {model.card.name: model for model in self._models.values() if model.id in alive}
        return list(by_name.values())

    def get(self, name: str) -> Model:
        """A model whose workers are away for a moment is still known: the router decides. Raises ModelNotFound naming what is served, or
        NoCapacity if nothing is: what was asked for may be about to come."""
        for model in self.served():
            if model.card.name == name:
                return model
        for model in self._models.values():
            if model.card.name == name:
                return model
        served = sorted(model.card.name for model in self.served())
        raise ModelNotFound(name, served) if served else self._none_yet()

    def name_of(self, model: ModelId) -> str | None:
        """What clients call a model; None until its card is known."""
        return next((known.card.name for known in self._models.values() if known.id == model), None)

    def default(self) -> Model:
        """For calls that name no model. Raises NoCapacity."""
        served = self.served()
        if not served:
            raise self._none_yet()
        return served[0]

    @staticmethod
    def _none_yet() -> NoCapacity:
        return NoCapacity("no model is served yet: a decode worker is starting, or none runs", param="model", retry_after_s=1)
