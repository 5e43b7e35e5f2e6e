"""Learns what is common in prompts: how many hold each shingle, and which blocks many chains share. Off the decision's path."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from services.router.sketch import MAX_TOKENS, MAX_WEIGHT, NUM_BUCKETS, Terms, shingle_hashes
from shared.kv.hashing import split
from shared.types import KEY_BYTES

HOT_CHAINS = 8
"""A block is hot if more chains than this share it."""
MAX_BLOCKS_PER_PROMPT = 512
MAX_BLOCKS = 65_536
"""Remembered; those seen longest ago are forgotten."""
MAX_HOT = 8192
MIN_PROMPTS = 256
"""Before so many prompts, nobody can tell what is common."""


class _Block:
    """One block of the tree of chains."""

    __slots__ = ("has_child", "num_chains")

    def __init__(self) -> None:
        self.num_chains = 1
        """Ends of chains below it: a conversation that goes on has one, however many turns."""
        self.has_child = False


class TermCounts:
    """What one router saw since its last snapshot."""

    def __init__(self) -> None:
        self.num_prompts = 0
        self._prompts_with = np.zeros(NUM_BUCKETS, dtype=np.int64)
        self._blocks: OrderedDict[bytes, _Block] = OrderedDict()

    def see(self, packed_tokens: bytes, packed_keys: bytes) -> None:
        """One prompt."""
        self.num_prompts += 1
        buckets = (shingle_hashes(packed_tokens[: 4 * MAX_TOKENS]) >> np.uint64(48)).astype(np.int64)
        self._prompts_with += np.bincount(buckets, minlength=NUM_BUCKETS) > 0
        self._see_chain(split(packed_keys[: KEY_BYTES * MAX_BLOCKS_PER_PROMPT], KEY_BYTES))

    def _see_chain(self, keys: list[bytes]) -> None:
        known = next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in keys[:known]:
            self._blocks.move_to_end(key)
        if known == len(keys):
            return
        branches = known > 0 and self._blocks[keys[known - 1]].has_child
        for key in keys[:known] if branches else ():
            self._blocks[key].num_chains += 1
        for key in keys[known:]:
            self._blocks[key] = _Block()
        for key in keys[max(known - 1, 0) : -1]:
            self._blocks[key].has_child = True
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def snapshot(self, version: int) -> Terms:
        """Rare shingles weigh 15, those of every prompt 0. Needs at least one prompt."""
        rarity = np.log((self.num_prompts + 1) / (self._prompts_with + 1)) / np.log(self.num_prompts + 1)
        weights = np.rint(rarity * MAX_WEIGHT).astype(np.uint8)
        hot = [key for key, block in self._blocks.items() if block.num_chains > HOT_CHAINS]
        return Terms(version, self.num_prompts, weights.tobytes(), b"".join(hot[-MAX_HOT:]))
