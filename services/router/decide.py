"""Where a request is prefilled and decoded, and why (DESIGN 6). Pure: state in, Decision out."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from services.router.config import Disaggregation
from services.router.index import Holder, PrefixIndex
from services.router.load import Loads, WorkerState
from shared.kv.hashing import split
from shared.messages.request import GenerateRequest
from shared.types import KEY_BYTES, InstanceId

SLOTS_FACTOR = 2
"""A decode worker is sent at most so many requests for each slot."""
SMALL_REST_BUDGETS = 2
"""Less than so many prefill budgets left to compute: decode does it itself."""
WORTH_ASKING_TOKENS = 128
"""The index may lag behind the stores by some milliseconds: for shorter prompts, asking a store costs more than it may save."""
WINDOW = 1.25
"""Overlap counts only at workers with at most so many times the mean load (and one request more): a hot prefix spreads."""
DEFAULT_PREFILL_TOKENS_PER_S = 1000.0
DEFAULT_STEP_MS = 20.0


class Weights(msgspec.Struct, frozen=True):
    """Of the features of a candidate. The default is the classic cost: uncached prefill + active decode, in blocks."""

    uncached_blocks: float = 1.0
    queued_blocks: float = 1.0
    active_blocks: float = 1.0
    active_requests: float = 0.0


class Candidate(NamedTuple):
    """A decode worker as seen for one request."""

    worker: InstanceId
    num_overlap_blocks: int
    num_device_blocks: int
    """Of the overlap, blocks in the worker's own pool; the rest lies on its host."""
    uncached_blocks: float
    queued_blocks: float
    active_blocks: float
    active_requests: float
    score: float


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
    candidates: list[Candidate]


class Decider:
    """Reads the index and the loads; writes nothing. Ties are broken by `rng`."""

    def __init__(
        self, index: PrefixIndex, loads: Loads, disaggregation: Disaggregation, rng: random.Random, weights: Weights | None = None
    ) -> None:
        self._index = index
        self._loads = loads
        self._disaggregation = disaggregation
        self._rng = rng
        self.weights = weights or Weights()

    def decide(self, request: GenerateRequest) -> Decision | None:
        """None: no decode worker of the model has room now."""
        workers = self._loads.of_model("decode", request.model)
        block_size = workers[0].lease.block_size if workers else 1
        num_blocks = request.num_tokens // block_size + 1
        open_workers = [state for state in workers if has_room(state, num_blocks)]
        if not open_workers:
            return None
        keys = split(request.block_keys, KEY_BYTES)[: (request.num_tokens - 1) // block_size]
        overlap = self._index.overlap(keys)
        candidates = [self._candidate(state, overlap, request.num_tokens, block_size) for state in open_workers]
        chosen = self._choose(candidates, open_workers)
        state = self._loads.workers[chosen.worker]
        uncached = request.num_tokens - chosen.num_overlap_blocks * block_size
        prefill, reason = self._prefill_worker(request, state, uncached, overlap, block_size)
        rest = request.num_tokens - (request.num_tokens - 1) // block_size * block_size
        return Decision(
            decode_worker=chosen.worker,
            prefill_worker=prefill,
            num_overlap_blocks=chosen.num_overlap_blocks,
            num_overlap_tokens=chosen.num_overlap_blocks * block_size,
            num_uncached_tokens=uncached,
            num_decode_tokens=uncached if prefill is None else rest,
            may_be_held=bool(overlap) or request.num_tokens >= WORTH_ASKING_TOKENS,
            num_blocks=num_blocks,
            reason=reason,
            candidates=candidates,
        )

    def could_serve(self, model: str, num_tokens: int) -> bool:
        """Whether any decode worker of the model is there at all, with a pool that the prompt fits."""
        workers = self._loads.of_model("decode", model)
        return any(num_tokens // state.lease.block_size + 1 <= state.lease.num_blocks for state in workers)

    def _candidate(self, state: WorkerState, overlap: Mapping[Holder, int], num_tokens: int, block_size: int) -> Candidate:
        lease, weights = state.lease, self.weights
        on_device = overlap.get(Holder(lease.instance, "device"), 0)
        best = max(on_device, held_by_host(overlap, lease.host))
        features = (
            num_tokens / block_size - best,
            state.num_queued_tokens / block_size,
            float(state.num_used_blocks),
            float(state.num_requests),
        )
        terms = zip((weights.uncached_blocks, weights.queued_blocks, weights.active_blocks, weights.active_requests), features, strict=True)
        return Candidate(lease.instance, best, on_device, *features, score=sum(weight * feature for weight, feature in terms))

    def _choose(self, candidates: list[Candidate], states: list[WorkerState]) -> Candidate:
        """The lowest score inside the load window; among equals, where nothing was sent for longest, then at random."""
        mean = sum(candidate.active_requests for candidate in candidates) / len(candidates)
        window = [candidate for candidate in candidates if candidate.active_requests <= mean * WINDOW + 1]
        lowest = min(candidate.score for candidate in window)
        best = [candidate for candidate in window if candidate.score <= lowest + 1e-9]
        if len(best) == 1:
            return best[0]
        last_sent = {state.lease.instance: state.last_sent_s for state in states}
        return min(best, key=lambda candidate: (last_sent[candidate.worker], self._rng.random()))

    def _prefill_worker(
        self, request: GenerateRequest, decode: WorkerState, uncached: int, overlap: Mapping[Holder, int], block_size: int
    ) -> tuple[InstanceId | None, str]:
        if self._disaggregation == "never":
            return None, "disaggregation=never"
        workers = self._loads.of_model("prefill", request.model)
        if not workers:
            return None, "no prefill worker"
        if self._disaggregation == "auto" and uncached < SMALL_REST_BUDGETS * decode.lease.prefill_budget:
            return None, "little left to compute"
        costs = [(self._prefill_s(state, request, overlap, block_size), self._rng.random(), state) for state in workers]
        cost_s, _, best = min(costs)
        if self._disaggregation == "auto" and decode_s(decode, uncached) <= cost_s:
            return None, "decode is sooner"
        return best.lease.instance, "prefill apart"

    def _prefill_s(self, state: WorkerState, request: GenerateRequest, overlap: Mapping[Holder, int], block_size: int) -> float:
        """Until the prompt's blocks are computed there."""
        held = max(overlap.get(Holder(state.lease.instance, "device"), 0), held_by_host(overlap, state.lease.host))
        return (state.num_queued_tokens + request.num_tokens - held * block_size) / rate_of(state)


def has_room(state: WorkerState, num_blocks: int) -> bool:
    lease = state.lease
    if state.num_requests >= SLOTS_FACTOR * lease.max_num_seqs:
        return False
    return state.num_used_blocks + num_blocks <= lease.num_blocks or (not state.num_requests and num_blocks <= lease.num_blocks)


def held_by_host(overlap: Mapping[Holder, int], host: str | None) -> int:
    if host is None:
        return 0
    return max(overlap.get(Holder(host, "dram"), 0), overlap.get(Holder(host, "ssd"), 0))


def rate_of(state: WorkerState) -> float:
    """Prompt tokens a second, as measured there."""
    rate = state.report.prefill_tokens_per_s if state.report else 0.0
    return rate or DEFAULT_PREFILL_TOKENS_PER_S


def decode_s(state: WorkerState, uncached: int) -> float:
    """Until a decode worker has computed them: at full rate alone, else a budget a step, which then takes so much longer."""
    tokens = state.num_queued_tokens + uncached
    if state.num_requests == 0:
        return tokens / rate_of(state)
    step_s = (state.report.step_ms if state.report and state.report.step_ms else DEFAULT_STEP_MS) / 1000
    budget = max(state.lease.prefill_budget, 1)
    return tokens / budget * (step_s + budget / rate_of(state))
