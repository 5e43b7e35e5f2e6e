"""The block pool against a model of sets and dicts."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.errors import OutOfBlocks
from shared.kv.block_pool import BlockPool

NUM_BLOCKS = 12


def hash_of(chain: int, depth: int) -> bytes:
    return bytes([chain]) + depth.to_bytes(31, "big")


class Pool(RuleBasedStateMachine):
    """Chains are prefixes of a few endless token streams."""

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.chains: list[tuple[int, list[int]]] = []
        self.content: dict[int, bytes] = {}
        """What each block was last filled with."""

    @rule(chain=st.integers(0, 3), count=st.integers(1, 6))
    def begin(self, chain: int, count: int) -> None:
        hashes = [hash_of(chain, depth) for depth in range(count)]
        held = self.pool.match_prefix(hashes)
        for block, block_hash in zip(held, hashes, strict=False):
            assert self.content[block] == block_hash, "a hit on other content"
        before = self.pool.num_free
        if count - len(held) > before:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count - len(held))
            assert self.pool.num_free == before
            self.pool.free(held)
            return
        new = self.pool.allocate(count - len(held))
        blocks = held + new
        assert len(set(blocks)) == len(blocks)
        for depth in range(len(held), count):
            self.content[blocks[depth]] = hashes[depth]
            self.pool.cache(blocks[depth], hashes[depth], hashes[depth - 1] if depth else b"seed")
        self.chains.append((chain, blocks))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.chains:
            _, blocks = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
            self.pool.free(blocks)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        assert self.pool.num_cached == 0

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        held = {block for _, blocks in self.chains for block in blocks}
        assert self.pool.num_used == len(held)
        for block_hash, _ in self.pool.entries():
            assert block_hash in self.content.values()


TestPool = Pool.TestCase


def test_changes_replay_to_the_cache() -> None:
    pool = BlockPool(3)
    seen: set[bytes] = set()
    for chain in range(5):
        blocks = pool.allocate(2)
        for depth, block in enumerate(blocks):
            pool.cache(block, hash_of(chain, depth), b"")
        pool.free(blocks)
        for change in pool.take_changes():
            (seen.add if change.is_stored else seen.remove)(change.block_hash)
        assert seen == {block_hash for block_hash, _ in pool.entries()}


def test_suffixes_are_handed_out_before_their_parents() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    for depth, block in enumerate(chain):
        pool.cache(block, hash_of(0, depth), b"")
    pool.free(chain)
    assert pool.allocate(1) == [chain[2]]
    assert pool.num_matching([hash_of(0, depth) for depth in range(3)]) == 2


def test_blocks_without_content_are_handed_out_first() -> None:
    pool = BlockPool(2)
    [cached, plain] = pool.allocate(2)
    pool.cache(cached, hash_of(0, 0), b"")
    pool.free([cached])
    pool.free([plain])
    assert pool.allocate(1) == [plain]
