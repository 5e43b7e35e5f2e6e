"""Sketches of prompts: 64-bit SimHashes of fixed spans, of shingles of 3 tokens, weighted by how rare they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.router.kernel import KERNEL
from shared.types import KEY_BYTES

SHINGLE = 3
SPANS = (256, 512, 1024, 2048, 4096)
WHOLE = 0
"""The name of the span that is the whole prompt."""
MAX_TOKENS = 32_768
"""Of a longer prompt, the whole is its beginning."""
MIN_WEIGHTED = 64
"""Shingles of a span that must have a weight: strangers share too little below."""
NUM_BUCKETS = 65_536
"""Shingles are told apart by 16 bits of their hash when it comes to how rare they are."""

MAX_WEIGHT = 15
Words = NDArray[np.uint64]


class Terms(msgspec.Struct, frozen=True, array_like=True, tag="terms"):
    """One snapshot of what is common: in bucket ss_config, key `router.terms`. Sketches of two versions are never compared."""

    version: Annotated[int, msgspec.Meta(ge=1, le=2**40)]
    num_prompts: int
    weights: Annotated[bytes, msgspec.Meta(min_length=NUM_BUCKETS, max_length=NUM_BUCKETS)]
    """A byte of 0 to 15 a bucket: inverse document frequency."""
    hot: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * 16_384)]
    """Keys of blocks that many chains share."""


class Sketch(NamedTuple):
    """Of one span that qualified."""

    span: int
    code: int


_named: Callable[[tuple[int, int]], Sketch] = partial(tuple.__new__, Sketch)
"""Sketch(span, code) in a fifth of its time, of which a decision has several."""


class Sketcher:
    """Sketches by one snapshot. `terms` None: every shingle counts the same, no block is hot, the version is 0."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.version = terms.version if terms else 0
        self._weights = (
            np.minimum(np.frombuffer(terms.weights, dtype=np.uint8), MAX_WEIGHT) if terms else np.ones(NUM_BUCKETS, dtype=np.uint8)
        )
        hot = terms.hot if terms else b""
        self._hot = frozenset(hot[at : at + KEY_BYTES] for at in range(0, len(hot), KEY_BYTES))
        self._codes, self._counts = np.zeros(len(SPANS) + 1, dtype=np.uint64), np.zeros(len(SPANS) + 1, dtype=np.int64)
        self._to_weights, self._to_codes, self._to_counts = (array.ctypes.data for array in (self._weights, self._codes, self._counts))

    def sketch(self, packed_tokens: bytes, packed_keys: bytes, block_size: int) -> list[Sketch]:
        """The spans that qualify, the shortest first, the whole last."""
        spans, ends, to_ends = ends_of(min(len(packed_tokens) // 4, MAX_TOKENS))
        first = self._num_hot(packed_keys) * block_size
        if KERNEL is not None:
            KERNEL.simhash(packed_tokens, first, to_ends, len(spans), self._to_weights, self._to_codes, self._to_counts)
            codes, counts = self._codes.tolist(), self._counts.tolist()
        else:
            codes, counts = simhash(packed_tokens, first, ends.tolist(), self._weights)
        return [_named((span, code)) for span, code, count in zip(spans, codes, counts, strict=False) if count >= MIN_WEIGHTED]

    def _num_hot(self, packed_keys: bytes) -> int:
        """Leading blocks that are hot: what many share, they share from the beginning on."""
        hot, at = self._hot, 0
        if hot:
            while packed_keys[at : at + KEY_BYTES] in hot:
                at += KEY_BYTES
        return at // KEY_BYTES


@lru_cache(maxsize=4096)
def ends_of(num_tokens: int) -> tuple[list[int], NDArray[np.int64], int]:
    """The spans of a prompt, where each ends, and where the ends lie in memory."""
    spans = [span for span in SPANS if span < num_tokens]
    ends = np.array([*spans, num_tokens], dtype=np.int64)
    return [*spans, WHOLE], ends, ends.ctypes.data


def simhash(packed_tokens: bytes, first: int, ends: list[int], weights: NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """The reference of kernel.c's `simhash`: a code, and the number of weighted shingles, up to each end."""
    hashes = shingle_hashes(packed_tokens[: 4 * ends[-1]])
    weighed = weights[hashes >> np.uint64(48)].astype(np.int64)
    codes, counts = [], []
    bits = ((hashes[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.int64) * 2 - 1
    for end in ends:
        some = slice(min(first, len(hashes)), max(end - SHINGLE + 1, 0))
        lanes = weighed[some] @ bits[some]
        codes.append(sum(1 << lane for lane in np.flatnonzero(lanes > 0).tolist()))
        counts.append(int(np.count_nonzero(weighed[some])))
    return codes, counts


def shingle_hashes(packed_tokens: bytes) -> Words:
    """[num_tokens - 2] A hash for each shingle of 3 tokens: those of its tokens, each turned by its place."""
    tokens = np.frombuffer(packed_tokens, dtype="<u4")
    if len(tokens) < SHINGLE:
        return np.zeros(0, dtype=np.uint64)
    low = _mixed(tokens * np.uint32(0x9E3779B1) + np.uint32(0x7F4A7C15))
    high = _mixed(tokens * np.uint32(0x27D4EB2F) + np.uint32(0x165667B1))
    words = high.astype(np.uint64) << np.uint64(32) | low
    hashes: Words = words[:-2] ^ _rotated(words[1:-1], 23) ^ _rotated(words[2:], 46)
    return hashes


def _mixed(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    for shift, factor in ((15, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
    return words ^ (words >> np.uint32(16))


def _rotated(words: Words, bits: int) -> Words:
    return words << np.uint64(bits) | words >> np.uint64(64 - bits)
