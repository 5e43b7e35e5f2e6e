"""Prompts that look alike: a hint where blocks will be soon. The only file that knows FAISS.

A sketch is compared only with those of the same tenant, model, span and version. Slots are reused in place, the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import faiss
import numpy as np

from services.router.kernel import KERNEL
from services.router.sketch import WHOLE, Sketch
from shared.types import KEY_BYTES, InstanceId

BITS = 64
MAX_DISTANCE = 6
"""Bits that may differ: more than 90 % are the same."""
NUM_NEIGHBOURS = 4
MAX_FOUND = 64
"""Codes looked at that are near enough; of more, the rest is left out."""
SPAN_CAPACITY = 4096
"""Prompts remembered of one tenant, model and span."""
MAX_GROUPS = 1024
"""Tenant × model × span; the one used longest ago goes."""


class Remembered(NamedTuple):
    """A prompt that was routed."""

    block_keys: bytes
    decode_worker: InstanceId
    prefill_worker: InstanceId | None = None
    key: str = ""
    """`request_id:epoch`"""


class Neighbour(NamedTuple):
    """A prompt like ours, and how many of its leading blocks are ours too."""

    prompt: Remembered
    num_blocks: int
    distance: int


class SpanIndex:
    """The sketches of one span. A flat index: a scan of some thousand codes beats hashing, whose probes miss the cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._index: Any = faiss.IndexBinaryFlat(BITS)
        self._prompts: list[Remembered] = []
        self._next = 0
        self._codes = np.zeros((0, BITS // 8), dtype=np.uint8)
        self._to_codes = 0
        self._slots = np.zeros(MAX_FOUND, dtype=np.int64)
        self._to_slots = self._slots.ctypes.data

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, code: int, prompt: Remembered) -> None:
        packed = np.array([code], dtype=np.uint64).view(np.uint8)
        if len(self._prompts) < self._capacity:
            self._index.add(packed.reshape(1, -1))
            self._prompts.append(prompt)
            count = len(self._prompts)
            self._codes = faiss.rev_swig_ptr(self._index.xb.data(), count * BITS // 8).reshape(count, BITS // 8)
            self._to_codes = self._codes.ctypes.data
            return
        self._codes[self._next] = packed
        self._prompts[self._next] = prompt
        self._next = (self._next + 1) % self._capacity

    def near(self, code: int) -> list[tuple[int, Remembered]]:
        """(bits that differ, prompt), the nearest first."""
        if KERNEL is None:
            return self._search(code)
        found = KERNEL.near(self._to_codes, len(self._prompts), code, MAX_DISTANCE, MAX_FOUND, self._to_slots)
        if not found:
            return []
        codes = self._codes.view(np.uint64)[:, 0]
        near = [((int(codes[slot]) ^ code).bit_count(), self._prompts[slot]) for slot in self._slots[:found].tolist()]
        return sorted(near, key=itemgetter(0))[:NUM_NEIGHBOURS]

    def _search(self, code: int) -> list[tuple[int, Remembered]]:
        """By FAISS itself: what the kernel's scan of its codes saves is the price of a call, three times that of the scan."""
        query = np.array([[code]], dtype=np.uint64).view(np.uint8)
        distances, slots = self._index.search(query, NUM_NEIGHBOURS)
        pairs = zip(distances[0].tolist(), slots[0].tolist(), strict=True)
        return [(distance, self._prompts[slot]) for distance, slot in pairs if slot >= 0 and distance <= MAX_DISTANCE]


class SimilarityIndex:
    """Every tenant's sketches of the current version."""

    def __init__(self, capacity: int = SPAN_CAPACITY, max_groups: int = MAX_GROUPS) -> None:
        faiss.omp_set_num_threads(1)  # for one query, more only add jitter
        self._capacity = capacity
        self._max_groups = max_groups
        self._spans: OrderedDict[tuple[str, str, int], SpanIndex] = OrderedDict()
        self.version = 0

    def __len__(self) -> int:
        return sum(map(len, self._spans.values()))

    def begin(self, version: int) -> None:
        """Sketches are made otherwise from now on: the old ones say nothing any more."""
        self.version = version
        self._spans.clear()

    def add(self, partition: str, model: str, sketches: Sequence[Sketch], version: int, prompt: Remembered) -> None:
        """Remember a prompt by every span that qualified."""
        if version != self.version:
            return
        for sketch in sketches:
            key = (partition, model, sketch.span)
            span = self._spans.get(key)
            if span is None:
                span = self._spans[key] = SpanIndex(self._capacity)
                if len(self._spans) > self._max_groups:
                    self._spans.popitem(last=False)
            self._spans.move_to_end(key)
            span.add(sketch.code, prompt)

    def find(self, partition: str, model: str, sketches: Sequence[Sketch], block_keys: bytes, num_known: int) -> Neighbour | None:
        """The neighbour with the most blocks of ours, if that is more than the `num_known` that somebody is known to hold.

        At most two look-ups: the whole, and the longest span.
        """
        best: Neighbour | None = None
        for sketch in sketches[-2:]:
            span = self._spans.get((partition, model, sketch.span))
            for distance, prompt in span.near(sketch.code) if span is not None else ():
                num_blocks = common_blocks(prompt.block_keys, block_keys)
                if num_blocks > (best.num_blocks if best else num_known):
                    best = Neighbour(prompt, num_blocks, distance)
        return best


def common_blocks(ours: bytes, theirs: bytes) -> int:
    """Leading blocks that are the same. A key names all before it: the first that differs is found by halving."""
    low, high = 0, min(len(ours), len(theirs)) // KEY_BYTES
    while low < high:
        middle = (low + high) // 2
        at = middle * KEY_BYTES
        if ours[at : at + KEY_BYTES] == theirs[at : at + KEY_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low


def pack_sketches(sketches: Sequence[Sketch]) -> list[int]:
    """For a Route: span, code, span, code …"""
    return [number for sketch in sketches for number in sketch]


def unpack_sketches(numbers: Sequence[int]) -> list[Sketch]:
    """Raises ValueError."""
    sketches = [Sketch(span, code) for span, code in zip(numbers[::2], numbers[1::2], strict=True)]
    if any(not (0 <= sketch.code < 2**BITS and WHOLE <= sketch.span < 2**20) for sketch in sketches):
        raise ValueError("no sketches")
    return sketches
