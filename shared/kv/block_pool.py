"""The device pool's blocks: who holds which, and the prefix cache. Plain integers; the bytes are the engine's.

A freed block keeps its hash and can be found until it is handed out again: that sentence is the whole prefix cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from shared.errors import OutOfBlocks


class Change(NamedTuple):
    """A block that can be found from now on, or no longer."""

    is_stored: bool
    block_hash: bytes
    parent: bytes
    """The hash before it in its chain."""


class BlockPool:
    """`num_blocks` blocks, numbered from 0. A call that raises has changed nothing; every operation is O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_refs = [0] * num_blocks
        self._hashes: list[tuple[bytes, bytes] | None] = [None] * num_blocks
        """(hash, parent) of cached blocks."""
        self._by_hash: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        """Blocks that nobody holds, the next to be handed out first."""
        self._changes: list[Change] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by hash."""
        return len(self._by_hash)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, held once each. Raises OutOfBlocks."""
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free))
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._num_refs[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of a chain's blocks, first to last. Suffixes are handed out again before their parents."""
        for block in reversed(blocks):
            assert self._num_refs[block] > 0, "freed more often than held"
            self._num_refs[block] -= 1
            if self._num_refs[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def cache(self, block: int, block_hash: bytes, parent: bytes) -> None:
        """Let a held, full block be found. If another block holds the same, that one stays the one that is found."""
        assert self._num_refs[block] > 0, "only held blocks can be cached"
        if block_hash not in self._by_hash and self._hashes[block] is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = (block_hash, parent)
            self._changes.append(Change(True, block_hash, parent))

    def match_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the longest leading run of cached blocks and return it."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            if self._num_refs[block] == 0:
                del self._free[block]
            self._num_refs[block] += 1
            blocks.append(block)
        return blocks

    def num_matching(self, hashes: Sequence[bytes]) -> int:
        """Length of the leading run, without holding it."""
        for count, block_hash in enumerate(hashes):
            if block_hash not in self._by_hash:
                return count
        return len(hashes)

    def clear(self) -> None:
        """Forget every cached block; what is held stays held."""
        for block in list(self._by_hash.values()):
            self._forget(block)

    def take_changes(self) -> list[Change]:
        """What changed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def entries(self, start: int = 0, stop: int | None = None) -> list[tuple[bytes, bytes]]:
        """(hash, parent) of the cached ones among blocks `start` to `stop`."""
        return [entry for entry in self._hashes[start:stop] if entry is not None]

    def check_integrity(self) -> None:
        """Held and free blocks are all blocks, and the cache agrees with itself."""
        for block, num_refs in enumerate(self._num_refs):
            assert (num_refs == 0) == (block in self._free), f"block {block} is held {num_refs} times"
        cached = {entry[0]: block for block, entry in enumerate(self._hashes) if entry is not None}
        assert cached == self._by_hash

    def _forget(self, block: int) -> None:
        entry = self._hashes[block]
        if entry is not None:
            del self._by_hash[entry[0]]
            self._hashes[block] = None
            self._changes.append(Change(False, *entry))
