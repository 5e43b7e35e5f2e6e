"""What routers share through ss_config: the weights they read, the terms that one of them writes, the models' cards."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from services.router.decide import Decider
from services.router.score import DEFAULT_WEIGHTS, ClassWeights
from services.router.similarity import SimilarityIndex
from services.router.sketch import Sketcher, Terms
from services.router.terms import MIN_PROMPTS, TermCounts
from shared.bus.base import Bus, Entry
from shared.errors import BusClosed, BusError, MalformedMessage, RevisionConflict
from shared.messages.codec import decode, encode
from shared.messages.fleet import ModelCard
from shared.messages.request import GenerateRequest
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry

WEIGHTS_KEY = "planner.weights"
TERMS_KEY = "router.terms"
CARD_PREFIX = "model."
RENEW_S = 6 * 3600.0
"""Terms are renewed rarely: every renewal forgets all sketches."""
LOOK_S = 5.0
SAMPLE = 4
"""Every so manieth prompt is counted."""
RETRY_S = 0.5

log = logging.getLogger(__name__)


class Settings:
    """Bad weights and bad terms are refused and counted; the last good ones stay."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry, decider: Decider, similarity: SimilarityIndex) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._decider = decider
        self._similarity = similarity
        self._counts = TermCounts()
        self._num_seen = 0
        self._revision = 0
        self._heard_s = 0.0
        self.model_digests: dict[str, bytes] = {}

    def see(self, request: GenerateRequest) -> None:
        """A prompt that was routed."""
        self._num_seen += 1
        if self._num_seen % SAMPLE == 0:
            self._counts.see(request.token_ids, request.block_keys)

    async def follow(self) -> None:
        """Take every change, for ever."""
        bucket = await self._bus.bucket(self._subjects.bucket("config"))
        while True:
            try:
                async for entry in bucket.watch():
                    self._take(entry)
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the watch of the settings broke off: %s", error)
            await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Write terms when there are none, or they are old, for ever. Of several routers, one's are taken."""
        bucket = await self._bus.bucket(self._subjects.bucket("config"))
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_S)
            is_due = not self._revision or loop.time() - self._heard_s > RENEW_S
            if not is_due or self._counts.num_prompts < MIN_PROMPTS:
                continue
            terms = encode(self._counts.snapshot(self._decider.sketcher.version + 1))
            try:
                if self._revision:
                    await bucket.update(TERMS_KEY, terms, self._revision)
                else:
                    await bucket.create(TERMS_KEY, terms)
            except RevisionConflict:  # another router was first, or the bucket was wiped
                entry = await bucket.get(TERMS_KEY)
                self._revision = entry.revision if entry is not None else 0
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the terms could not be written: %s", error)

    def _take(self, entry: Entry) -> None:
        if entry.key == WEIGHTS_KEY:
            self._take_weights(entry.value)
        elif entry.key == TERMS_KEY and entry.value is not None:
            self._take_terms(entry.value, entry.revision)
        elif entry.key.startswith(CARD_PREFIX) and entry.value is not None:
            card = self._decoded(ModelCard, entry.value, "card")
            if card is not None:
                self.model_digests[card.model] = card.model_digest

    def _take_weights(self, value: bytes | None) -> None:
        """JSON: {"high": {"uncached_blocks": 1.0, …}, "normal": …, "batch": …}; what a class does not name keeps its default. Deleted: the
        defaults."""
        try:
            self._decider.use(msgspec.json.decode(value, type=ClassWeights) if value is not None else DEFAULT_WEIGHTS)
        except (msgspec.MsgspecError, ValueError) as error:
            self._telemetry.count("router_bad_settings", kind="weights")
            log.warning("weights were refused, the last good ones stay: %s", error)

    def _take_terms(self, value: bytes, revision: int) -> None:
        self._revision, self._heard_s = revision, asyncio.get_running_loop().time()
        terms = self._decoded(Terms, value, "terms")
        if terms is not None and terms.version != self._decider.sketcher.version:
            self._decider.sketcher = Sketcher(terms)
            self._similarity.begin(terms.version)
            self._counts = TermCounts()

    def _decoded(self, kind: type[Any], value: bytes, name: str) -> Any:
        try:
            return decode(kind, value)
        except MalformedMessage as error:
            self._telemetry.count("router_bad_settings", kind=name)
            log.warning("a setting was refused: %s", error)
            return None
