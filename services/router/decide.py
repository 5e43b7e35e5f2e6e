"""Where a request is prefilled and decoded, and why (DESIGN 6). Pure: state in, Decision out. No span, log or metric inside."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.router.config import Disaggregation
from services.router.index import PrefixIndex, Runs
from services.router.load import ACTIVE_BLOCKS, ACTIVE_REQUESTS, LOAD, UNCACHED, Floats, Loads, Pool, WorkerState
from services.router.score import Candidate, View, Weights, score
from shared.messages.request import GenerateRequest
from shared.types import InstanceId

SMALL_REST_BUDGETS = 2
"""Less than so many prefill budgets left to compute: decode does it itself."""
WORTH_ASKING_TOKENS = 128
"""The index may lag behind the stores by some milliseconds: for shorter prompts, asking a store costs more than it may save."""
WINDOW = 1.25
"""Overlap counts only at workers with at most so many times the mean load (and one request more): a hot prefix spreads."""
TIE = 1e-9
DEFAULT_STEP_MS = 20.0

Blocks = NDArray[np.int32]


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
    view: View

    @property
    def candidates(self) -> list[Candidate]:
        return self.view.candidates()


class Holding(NamedTuple):
    """Which bit of the index stands for what a pool's workers can reach, as of one version of it."""

    pool: Pool
    version: int
    device: NDArray[np.intp]
    dram: NDArray[np.intp]
    ssd: NDArray[np.intp]


class Decider:
    """Reads the index and the loads; writes nothing. Ties are broken by `rng`."""

    def __init__(
        self, index: PrefixIndex, loads: Loads, disaggregation: Disaggregation, rng: random.Random, weights: Weights | None = None
    ) -> None:
        self._index = index
        self._loads = loads
        self._disaggregation = disaggregation
        self._rng = rng
        self._holding: dict[tuple[str, str], Holding] = {}
        self.use(weights or Weights())

    def use(self, weights: Weights) -> None:
        """From now on. Raises ValueError if they make no sense; the last good ones stay."""
        self._weights: Floats = weights.vector()

    def decide(self, request: GenerateRequest) -> Decision | None:
        """None: no decode worker of the model has room now."""
        pool = self._loads.pool("decode", request.model)
        num_tokens, block_size = request.num_tokens, pool.block_size
        num_blocks = num_tokens // block_size + 1
        is_open = room(pool, num_blocks)
        if not is_open.any():
            return None
        runs = self._index.runs(request.block_keys, min((num_tokens - 1) // block_size, len(request.block_keys) // 16))
        lengths = self._index.lengths(runs)
        on_device, held = self._held("decode", request.model, pool, lengths)
        features = pool.features.copy()
        np.subtract(num_tokens / block_size, held, out=features[UNCACHED])
        np.subtract(held, on_device, out=features[LOAD])
        scores = score(self._weights, features, is_open, WINDOW)
        row = self._choose(pool, scores)
        state, overlap = pool.states[row], int(held[row])
        uncached = num_tokens - overlap * block_size
        prefill, reason = self._prefill_worker(request, state, uncached, lengths)
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
            view=View(pool, features, scores),
        )

    def could_serve(self, model: str, num_tokens: int) -> bool:
        """Whether any decode worker of the model is there at all, with a pool that the prompt fits."""
        pool = self._loads.pool("decode", model)
        return num_tokens // pool.block_size + 1 <= pool.largest

    def _held(self, role: str, model: str, pool: Pool, lengths: Blocks) -> tuple[Blocks, Blocks]:
        """[num_workers] Leading blocks in each worker's own pool, and there or on its host."""
        holding = self._holding.get((role, model))
        if holding is None or holding.pool is not pool or holding.version != self._index.version:
            holding = self._holding[role, model] = self._find(pool)
        on_device = lengths[holding.device]
        return on_device, np.maximum(np.maximum(on_device, lengths[holding.dram]), lengths[holding.ssd])

    def _find(self, pool: Pool) -> Holding:
        bit, leases = self._index.bit, [state.lease for state in pool.states]
        return Holding(
            pool,
            self._index.version,
            np.array([bit(lease.instance, "device") for lease in leases], dtype=np.intp),
            np.array([bit(lease.host, "dram") for lease in leases], dtype=np.intp),
            np.array([bit(lease.host, "ssd") for lease in leases], dtype=np.intp),
        )

    def _choose(self, pool: Pool, scores: Floats) -> int:
        """The lowest score; among equals, where nothing was sent for longest, then at random."""
        best = np.flatnonzero(scores <= scores.min() + TIE)
        if len(best) > 1:
            sent = pool.last_sent_s[best]
            best = best[sent <= sent.min()]
        return int(best[0] if len(best) == 1 else best[self._rng.randrange(len(best))])

    def _prefill_worker(
        self, request: GenerateRequest, decode: WorkerState, uncached: int, lengths: Blocks
    ) -> tuple[InstanceId | None, str]:
        if self._disaggregation == "never":
            return None, "disaggregation=never"
        pool = self._loads.pool("prefill", request.model)
        if not pool.states:
            return None, "no prefill worker"
        if self._disaggregation == "auto" and uncached < SMALL_REST_BUDGETS * decode.lease.prefill_budget:
            return None, "little left to compute"
        _, held = self._held("prefill", request.model, pool, lengths)
        costs_s = (pool.queued_tokens + request.num_tokens - held * pool.block_size) / pool.tokens_per_s
        row = self._choose(pool, costs_s)
        if self._disaggregation == "auto" and decode_s(decode, uncached) <= costs_s[row]:
            return None, "decode is sooner"
        return pool.states[row].lease.instance, "prefill apart"


def room(pool: Pool, num_blocks: int) -> NDArray[np.bool_]:
    """[num_workers] Which have free blocks and slots for a request. A worker without any takes whatever fits into its pool."""
    used, requests = pool.features[ACTIVE_BLOCKS], pool.features[ACTIVE_REQUESTS]
    fits: NDArray[np.bool_] = used * (requests > 0) + num_blocks <= pool.num_blocks
    fits &= requests < pool.max_requests
    return fits


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
