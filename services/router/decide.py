"""Where a request is prefilled and decoded, and why. Pure: state in, Decision out. No span, log or metric inside."""

from __future__ import annotations

import random
from typing import NamedTuple

from services.router.choose import Holding, Vector, make_chooser
from services.router.config import Disaggregation
from services.router.hint import NO_HINT, Hint
from services.router.index import PrefixIndex
from services.router.load import Loads, Pool, WorkerState
from services.router.score import DEFAULT_WEIGHTS, Candidate, ClassWeights, View
from services.router.similarity import SimilarityIndex
from services.router.sketch import Sketcher
from services.router.source import Lengths, Runs
from shared.messages.request import GenerateRequest
from shared.messages.subjects import REQUEST_CLASSES
from shared.types import HostId, InstanceId

SMALL_REST_BUDGETS = 2
"""Less than so many prefill budgets left to compute: decode does it itself."""
WORTH_ASKING_TOKENS = 128
"""The index may lag behind the stores by some milliseconds: for shorter prompts, asking a store costs more than it may save."""
MUCH_TOKENS = 256
"""Similarity is asked if so much of a prompt is cached nowhere."""
DEFAULT_STEP_MS = 20.0


class Decision(NamedTuple):
    """`prefill_worker` None: straight to decode."""

    decode_worker: InstanceId
    prefill_worker: InstanceId | None
    num_overlap_blocks: int
    num_overlap_tokens: int
    num_uncached_tokens: int
    num_decode_tokens: int
    """Prompt tokens that the decode worker computes: behind prefill less than a block and one token."""
    may_be_held: bool
    """Whether workers should ask their host's store: not if nobody is known to hold a block and computing is cheaper than asking."""
    num_blocks: int
    """Booked at the decode worker."""
    reason: str
    """Why prefill was, or was not, put apart."""
    num_known_blocks: int
    """Longest leading run that anybody holds."""
    num_fast_blocks: int
    """Leading blocks in the memory of the decode worker or its host."""
    sources: list[HostId]
    """Other hosts that hold the longest run."""
    hint: Hint
    view: View

    @property
    def candidates(self) -> list[Candidate]:
        return self.view.candidates()


class Decider:
    """Reads the index and the loads; writes nothing. Ties are broken by `rng`."""

    def __init__(
        self,
        index: PrefixIndex,
        loads: Loads,
        disaggregation: Disaggregation,
        rng: random.Random,
        similarity: SimilarityIndex | None = None,
    ) -> None:
        self._index = index
        self._loads = loads
        self._disaggregation = disaggregation
        self._rng = rng
        self._chooser = make_chooser()
        self._holding: dict[tuple[str, str], Holding] = {}
        self.similarity = similarity
        self.sketcher = Sketcher()
        self.use(DEFAULT_WEIGHTS)

    def use(self, weights: ClassWeights) -> None:
        """From now on. Raises ValueError if they make no sense; the last good ones stay."""
        self._weights = {name: Vector.of(getattr(weights, name).vector()) for name in REQUEST_CLASSES}

    def decide(self, request: GenerateRequest) -> Decision | None:
        """None: no decode worker of the model has room now."""
        pool = self._loads.pool("decode", request.model)
        num_tokens, block_size = request.num_tokens, pool.block_size
        num_blocks = num_tokens // block_size + 1
        if not pool.states:
            return None
        runs = self._index.runs(request.block_keys, (num_tokens - 1) // block_size)
        lengths = self._index.lengths(runs)
        holding = self._holding_of("decode", pool, request.model)
        hint = self._hint(request, longest(runs), block_size)
        choice = self._chooser.decode(
            holding,
            self._weights[request.request_class],
            lengths,
            hint.expected_at(pool),
            num_tokens / block_size,
            num_blocks,
            self._rng.getrandbits(63),
        )
        if choice.row < 0:
            return None
        state, overlap = pool.states[choice.row], holding.held_at(lengths, choice.row)
        uncached = num_tokens - overlap * block_size
        prefill, reason = self._prefill_worker(request, state, uncached, lengths, hint)
        return Decision(
            decode_worker=state.lease.instance,
            prefill_worker=prefill,
            num_overlap_blocks=overlap,
            num_overlap_tokens=overlap * block_size,
            num_uncached_tokens=uncached,
            num_decode_tokens=uncached if prefill is None else num_tokens - (num_tokens - 1) // block_size * block_size,
            may_be_held=bool(runs) or num_tokens >= WORTH_ASKING_TOKENS,
            num_blocks=num_blocks,
            reason=reason,
            num_known_blocks=longest(runs),
            num_fast_blocks=holding.fast_at(lengths, choice.row),
            sources=self._index.hosts(runs) if longest(runs) > overlap else [],
            hint=hint,
            view=View(pool, choice.told),
        )

    def could_serve(self, model: str, num_tokens: int) -> bool:
        """Whether any decode worker of the model is there at all, with a pool that the prompt fits."""
        pool = self._loads.pool("decode", model)
        return num_tokens // pool.block_size + 1 <= pool.largest

    def _hint(self, request: GenerateRequest, num_known: int, block_size: int) -> Hint:
        """Prompts like this one, if much of it is cached nowhere."""
        if self.similarity is None or request.num_tokens - num_known * block_size < MUCH_TOKENS:
            return NO_HINT
        sketches = self.sketcher.sketch(request.token_ids, request.block_keys, block_size)
        neighbour = self.similarity.find(request.partition, request.model, sketches, request.block_keys, num_known)
        return Hint(sketches, self.sketcher.version, neighbour)

    def _holding_of(self, role: str, pool: Pool, model: str) -> Holding:
        holding = self._holding.get((role, model))
        if holding is None or holding.pool is not pool or holding.version != self._index.version:
            holding = self._holding[role, model] = Holding(pool, self._index)
        return holding

    def _prefill_worker(
        self, request: GenerateRequest, decode: WorkerState, uncached: int, lengths: Lengths, hint: Hint
    ) -> tuple[InstanceId | None, str]:
        if self._disaggregation == "never":
            return None, "disaggregation=never"
        pool = self._loads.pool("prefill", request.model)
        if not pool.states:
            return None, "no prefill worker"
        if self._disaggregation == "auto" and uncached < SMALL_REST_BUDGETS * decode.lease.prefill_budget:
            return None, "little left to compute"
        holding = self._holding_of("prefill", pool, request.model)
        under_way = hint.under_way_at(pool)
        row, cost_s = self._chooser.prefill(holding, lengths, under_way, request.num_tokens, self._rng.getrandbits(63))
        if self._disaggregation == "auto" and decode_s(decode, uncached) <= cost_s:
            return None, "decode is sooner"
        return pool.states[row].lease.instance, "prefill apart"


def longest(runs: Runs) -> int:
    return runs[-1][1] if runs else 0


def decode_s(state: WorkerState, uncached: int) -> float:
    """Until a decode worker has computed them: at full rate alone, else a budget a step, which then takes so much longer."""
    tokens, rate = state.num_queued_tokens + uncached, state.prefill_tokens_per_s
    if state.num_requests == 0:
        return tokens / rate
    step_s = (state.report.step_ms if state.report and state.report.step_ms else DEFAULT_STEP_MS) / 1000
    budget = max(state.lease.prefill_budget, 1)
    return tokens / budget * (step_s + budget / rate)
