"""Who gets a request. The last two are the router's own decision."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod

from services.router.decide import Decider
from services.router.index import PrefixIndex
from services.router.load import Loads
from services.router.similarity import Remembered, SimilarityIndex
from shared.messages.request import GenerateRequest

MODEL = "0123456789abcdef"


class Policy(ABC):
    def __init__(self, index: PrefixIndex, loads: Loads, generator: random.Random) -> None:
        self.index, self.loads, self.random = index, loads, generator

    @abstractmethod
    def choose(self, request: GenerateRequest) -> str | None:
        """A worker with room; None: it must wait."""

    def with_room(self, request: GenerateRequest) -> list[str]:
        """As the router sees it: slots and blocks."""
        pool = self.loads.pool("decode", MODEL)
        need = request.num_tokens // pool.block_size + 1
        return [
            state.lease.instance
            for state, most in zip(pool.states, pool.max_requests, strict=True)
            if state.num_requests < most and (not state.num_requests or state.num_used_blocks + need <= state.lease.num_blocks)
        ]


class Random(Policy):
    def choose(self, request: GenerateRequest) -> str | None:
        names = self.with_room(request)
        return self.random.choice(names) if names else None


class RoundRobin(Policy):
    def __init__(self, index: PrefixIndex, loads: Loads, generator: random.Random) -> None:
        super().__init__(index, loads, generator)
        self._turn = itertools.count()

    def choose(self, request: GenerateRequest) -> str | None:
        names = self.with_room(request)
        return names[next(self._turn) % len(names)] if names else None


class LeastLoaded(Policy):
    """Fewest requests."""

    def choose(self, request: GenerateRequest) -> str | None:
        names = self.with_room(request)
        return min(names, key=lambda name: (self.loads.workers[name].num_requests, self.random.random())) if names else None


class Exact(Policy):
    def __init__(self, index: PrefixIndex, loads: Loads, generator: random.Random, similarity: SimilarityIndex | None = None) -> None:
        super().__init__(index, loads, generator)
        self.similarity = similarity
        self._decider = Decider(index, loads, "never", generator, similarity)

    def choose(self, request: GenerateRequest) -> str | None:
        decision = self._decider.decide(request)
        if decision is None:
            return None
        if self.similarity is not None and decision.hint.sketches:
            prompt = Remembered(request.block_keys, decision.decode_worker, None)
            self.similarity.add(request.partition, request.model, decision.hint.sketches, decision.hint.version, prompt)
        return decision.decode_worker


class ExactAndSimilar(Exact):
    def __init__(self, index: PrefixIndex, loads: Loads, generator: random.Random) -> None:
        super().__init__(index, loads, generator, SimilarityIndex())


POLICIES: dict[str, type[Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "exact": Exact,
    "exact+similarity": ExactAndSimilar,
}
