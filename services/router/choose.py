"""The vectorised part of a decision: who has room, what each has, the scores, the lowest. In C, with numpy as its reference."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from services.router.hint import Blocks
from services.router.index import PrefixIndex
from services.router.kernel import KERNEL, CPool
from services.router.load import ACTIVE_BLOCKS, ACTIVE_REQUESTS, LOAD, NUM_FEATURES, UNCACHED, Floats, Pool
from services.router.score import NUM_TOLD, TOLD_FEATURES
from services.router.source import Lengths

WINDOW, SLACK = 1.1, 3.0
"""Overlap counts only at workers with at most WINDOW times the mean load, and SLACK requests more: a hot prefix spreads. Under little load
the slack lets a conversation stay where its blocks are."""
TIE = 1e-9


class Holding:
    """A pool, and which bit of the index stands for what each of its workers can reach, as of one version of the index."""

    def __init__(self, pool: Pool, index: PrefixIndex) -> None:
        leases = [state.lease for state in pool.states]
        self.pool = pool
        self.version = index.version
        self.device = np.array([index.bit(lease.instance, "device") for lease in leases], dtype=np.int64)
        self.dram = np.array([index.bit(lease.host, "dram") for lease in leases], dtype=np.int64)
        self.ssd = np.array([index.bit(lease.host, "ssd") for lease in leases], dtype=np.int64)
        self.scratch: Floats = np.empty((3, len(leases)))
        self.told: Floats = np.empty((NUM_TOLD, TOLD_FEATURES + NUM_FEATURES))
        arrays = (pool.features, pool.num_blocks, pool.max_requests, pool.queued_tokens, pool.tokens_per_s, pool.last_sent_s)
        ours = (self.device, self.dram, self.ssd, self.scratch, self.told)
        self._c = CPool(len(leases), pool.block_size, WINDOW, SLACK, TIE, *(array.ctypes.data for array in (*arrays, *ours)))
        self.address = ctypes.addressof(self._c)

    def device_blocks(self, lengths: Lengths) -> Blocks:
        """[num_workers] Leading blocks in each worker's own pool."""
        return lengths.by_bit[self.device]

    def held_blocks(self, lengths: Lengths) -> Blocks:
        """[num_workers] Leading blocks there or on its host."""
        return np.maximum(np.maximum(lengths.by_bit[self.device], lengths.by_bit[self.dram]), lengths.by_bit[self.ssd])

    def held_at(self, lengths: Lengths, row: int) -> int:
        """Leading blocks at one worker or on its host."""
        return int(max(lengths.by_bit[self.device[row]], lengths.by_bit[self.dram[row]], lengths.by_bit[self.ssd[row]]))

    def fast_at(self, lengths: Lengths, row: int) -> int:
        """Leading blocks that are in memory there."""
        return int(max(lengths.by_bit[self.device[row]], lengths.by_bit[self.dram[row]]))


class Vector(NamedTuple):
    """Weights of the features, and where they lie in memory."""

    values: Floats
    address: int

    @classmethod
    def of(cls, values: Floats) -> Vector:
        return cls(values, values.ctypes.data)


class Choice(NamedTuple):
    """`row` -1: nobody has room."""

    row: int
    told: Floats
    """[at most NUM_TOLD, 2 + num_features] Row, score and features of the chosen one and the next best. None of them without room, or
    outside the load window."""


class Chooser(ABC):
    """Among equal scores, where nothing was sent for longest; among those, by `random` (64 bits)."""

    @abstractmethod
    def decode(
        self, at: Holding, weights: Vector, lengths: Lengths, expected: Blocks | None, prompt_blocks: float, need_blocks: int, random: int
    ) -> Choice:
        """`lengths` is of PrefixIndex.lengths; `expected` [num_workers]: blocks that will soon be there, by similarity."""

    @abstractmethod
    def prefill(self, at: Holding, lengths: Lengths, expected: Blocks | None, num_tokens: int, random: int) -> tuple[int, float]:
        """The worker where the prompt is computed soonest, and in how many seconds."""


class NumpyChooser(Chooser):
    """The reference."""

    def decode(
        self, at: Holding, weights: Vector, lengths: Lengths, expected: Blocks | None, prompt_blocks: float, need_blocks: int, random: int
    ) -> Choice:
        pool, features = at.pool, at.pool.features.copy()
        used, requests = features[ACTIVE_BLOCKS], features[ACTIVE_REQUESTS]
        is_open = (used * (requests > 0) + need_blocks <= pool.num_blocks) & (requests < pool.max_requests)
        if not is_open.any():
            return Choice(-1, at.told[:0])
        features[UNCACHED] = prompt_blocks - hoped_blocks(at, lengths, expected)
        features[LOAD] = at.held_blocks(lengths) - at.device_blocks(lengths)
        is_open &= requests <= requests[is_open].mean() * WINDOW + SLACK
        scores = np.where(is_open, weights.values @ features, np.inf)
        row = _pick(pool, scores, random)
        rows = [row, *(other for other in np.argsort(scores, kind="stable").tolist() if is_open[other] and other != row)][:NUM_TOLD]
        return Choice(row, np.column_stack([rows, scores[rows], features[:, rows].T]))

    def prefill(self, at: Holding, lengths: Lengths, expected: Blocks | None, num_tokens: int, random: int) -> tuple[int, float]:
        pool = at.pool
        costs_s = (pool.queued_tokens + num_tokens - hoped_blocks(at, lengths, expected) * pool.block_size) / pool.tokens_per_s
        row = _pick(pool, costs_s, random)
        return row, float(costs_s[row])


class KernelChooser(Chooser):
    """One call a pool."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        self._choose, self._choose_prefill = kernel.choose, kernel.choose_prefill

    def decode(
        self, at: Holding, weights: Vector, lengths: Lengths, expected: Blocks | None, prompt_blocks: float, need_blocks: int, random: int
    ) -> Choice:
        count = self._choose(at.address, weights.address, lengths.address, address_of(expected), prompt_blocks, need_blocks, random)
        told = at.told[:count].copy()
        return Choice(int(told[0, 0]) if count else -1, told)

    def prefill(self, at: Holding, lengths: Lengths, expected: Blocks | None, num_tokens: int, random: int) -> tuple[int, float]:
        row = self._choose_prefill(at.address, lengths.address, address_of(expected), num_tokens, random)
        return row, float(at.scratch[0, row])


def hoped_blocks(at: Holding, lengths: Lengths, expected: Blocks | None) -> Blocks:
    """[num_workers] Leading blocks that are at each worker or on its host, or soon will be."""
    held = at.held_blocks(lengths)
    return held if expected is None else np.maximum(held, expected)


def address_of(blocks: Blocks | None) -> int | None:
    return None if blocks is None else blocks.ctypes.data


def _pick(pool: Pool, scores: Floats, random: int) -> int:
    best = np.flatnonzero(scores <= scores.min() + TIE)
    sent = pool.last_sent_s[best]
    best = best[sent <= sent.min()]
    return int(best[random % len(best)])


def make_chooser() -> Chooser:
    return NumpyChooser() if KERNEL is None else KernelChooser(KERNEL)
