"""What one tier holds: blocks by key, their chains, and who goes first. No bytes, no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator

from services.kvstore.segments import SizeClass
from services.kvstore.tiers.shares import MakePolicy, Share, Shares
from shared.types import KEY_BYTES


class Block:
    """One block in one tier. Linked into its chain: `parent` (if held here) and the children held here."""

    __slots__ = (
        "children",
        "depth",
        "digest",
        "generation",
        "is_parked",
        "key",
        "model_digest",
        "num_holds",
        "offset",
        "ordinal",
        "parent",
        "parent_digest",
        "share",
        "siblings",
        "size_class",
        "tenant",
    )

    def __init__(
        self, digest: bytes, parent_digest: bytes, model_digest: bytes, tenant: str, size_class: SizeClass, offset: int, generation: int
    ) -> None:
        self.key = digest[:KEY_BYTES]
        self.digest = digest
        self.parent_digest = parent_digest
        self.model_digest = model_digest
        self.tenant = tenant
        self.size_class = size_class
        self.offset = offset
        self.generation = generation
        self.depth = 0
        """Blocks before it in its chain, as far as they are held here."""
        self.num_holds = 0
        """Leases, pins and copies under way: a held block is not evicted."""
        self.is_parked = False
        self.parent: Block | None = None
        self.children: Block | None = None
        """One child; the others are its siblings."""
        self.siblings: tuple[Block, Block] = (self, self)
        """(previous, next) child of the same parent: a ring."""
        self.ordinal = -1
        """Place in the index; -1: not in it (reserved, or dropped while held)."""
        self.share: Share | None = None


def recompute_cost(depth: int) -> float:
    """What computing a block again costs for each of its bytes, in units of the first block: attention reads all blocks before it."""
    return 1.0 + depth / 64


class TierIndex:
    """Blocks of a tier. Suffixes go before their parents: a block with children here, or in use, is *parked* when its turn comes, and
    is the next to go when the last of them is gone."""

    def __init__(self, make_policy: MakePolicy) -> None:
        self._make_policy = make_policy
        self.blocks: dict[bytes, Block] = {}
        self._orphans: dict[bytes, Block] = {}
        """First child by the digest of a parent that is not held here (chain seeds, mostly)."""
        self.shares = Shares()
        self._ordinals: list[Block | None] = []
        self._free_ordinals: list[int] = []

    def __len__(self) -> int:
        return len(self.blocks)

    def get(self, digest: bytes, model_digest: bytes) -> Block | None:
        """The block, if it is exactly this one: all 32 bytes and the model agree."""
        block = self.blocks.get(digest[:KEY_BYTES])
        if block is None or block.digest != digest or block.model_digest != model_digest:
            return None
        return block

    # -- holding ----------------------------------------------------------------------------------------------------
    def insert(self, block: Block) -> None:
        """Hold a block whose key is not held yet, as most recently used."""
        self.blocks[block.key] = block
        self._link(block)
        block.ordinal = self._free_ordinals.pop() if self._free_ordinals else len(self._ordinals)
        if block.ordinal == len(self._ordinals):
            self._ordinals.append(block)
        else:
            self._ordinals[block.ordinal] = block
        key, size_class = (block.size_class.layout, block.model_digest, block.tenant), block.size_class
        block.share = self.shares.grow(key, lambda: self._make_policy(lambda: max(size_class.num_slots, 1)))
        block.share.policy.admit(block.key, recompute_cost(block.depth))

    def touch(self, block: Block) -> None:
        """The block was used. For a chain: last block first, so that parents outlive their suffixes."""
        assert block.share is not None
        if block.is_parked:
            block.is_parked = False
            block.share.policy.put_back(block.key)
        block.share.policy.access(block.key)

    def hold(self, block: Block) -> None:
        """Not evicted until as many `unhold`."""
        block.num_holds += 1

    def unhold(self, block: Block) -> None:
        block.num_holds -= 1
        self._unpark(block)

    def remove(self, block: Block) -> list[Block]:
        """Drop the block and its descendants here (useless without it), suffixes first. The dropped, in that order."""
        order = [block]
        for one in order:
            order.extend(self._children(one))
        order.reverse()
        for one in order:
            self._take_out(one)
            assert one.share is not None
            if one.is_parked:
                one.is_parked = False
                one.share.policy.put_back(one.key)
            one.share.policy.discard(one.key)
        return order

    # -- eviction ---------------------------------------------------------------------------------------------------
    def evict(self, share: Share, incoming: bytes | None = None) -> Block | None:
        """Take out the block of the share that goes first; None if all are in use."""
        while len(share.policy):
            block = self.blocks[share.policy.evict(incoming)]
            if block.num_holds == 0 and block.children is None:
                self._take_out(block)
                return block
            block.is_parked = True
            share.policy.park(block.key)
        return None

    def _unpark(self, block: Block) -> None:
        if block.is_parked and block.num_holds == 0 and block.children is None:
            assert block.share is not None
            block.is_parked = False
            block.share.policy.put_back(block.key)

    def _take_out(self, block: Block) -> None:
        """Forget the block, which the policy holds no more (or is about to)."""
        del self.blocks[block.key]
        self._ordinals[block.ordinal] = None
        self._free_ordinals.append(block.ordinal)
        block.ordinal = -1
        assert block.share is not None
        self.shares.shrink(block.share)
        self._unlink(block)

    # -- chains -----------------------------------------------------------------------------------------------------
    def _children(self, parent: Block) -> Iterator[Block]:
        first = child = parent.children
        while child is not None:
            yield child
            child = child.siblings[1]
            if child is first:
                return

    def _link(self, block: Block) -> None:
        parent = self.blocks.get(block.parent_digest[:KEY_BYTES])
        if parent is not None and parent.digest == block.parent_digest:
            block.parent = parent
            block.depth = parent.depth + 1
            parent.children = _join(parent.children, block)
        else:
            self._orphans[block.parent_digest] = _join(self._orphans.get(block.parent_digest), block)
        block.children = self._orphans.pop(block.digest, None)
        for child in self._children(block):
            child.parent = block

    def _unlink(self, block: Block) -> None:
        """Out of the parent's ring; children held here become orphans."""
        rest = _leave(block)
        parent = block.parent
        if parent is None:
            if rest is None:
                del self._orphans[block.parent_digest]
            else:
                self._orphans[block.parent_digest] = rest
        else:
            parent.children = rest
            self._unpark(parent)
        if block.children is not None:
            for child in self._children(block):
                child.parent = None
            self._orphans[block.digest] = block.children

    # -- reading all ------------------------------------------------------------------------------------------------
    def page(self, start: int, count: int) -> tuple[list[Block], int | None]:
        """Blocks at ordinals `start` to `start + count`, and where to go on. Complete together with the changes made meanwhile."""
        blocks = [block for block in self._ordinals[start : start + count] if block is not None]
        end = start + count
        return blocks, end if end < len(self._ordinals) else None

    def check_integrity(self) -> None:
        """For tests: the index agrees with itself."""
        assert sum(share.num_blocks for share in self.shares) == len(self.blocks)
        for share in self.shares:
            in_order = list(self.shares.biggest_first(share.key[0]))
            assert share in in_order and len(in_order) == self.shares.num_of(share.key[0])
            assert [one.num_blocks for one in in_order] == sorted((one.num_blocks for one in in_order), reverse=True)
            parked = sum(1 for block in self.blocks.values() if block.share is share and block.is_parked)
            assert share.num_blocks == len(share.policy) + parked, share.key
        for block in self.blocks.values():
            assert block.num_holds >= 0
            assert self._ordinals[block.ordinal] is block
            assert all(child.parent is block for child in self._children(block))
            assert block.parent is None or self.blocks[block.parent.key] is block.parent
            assert not block.is_parked or block.num_holds or block.children is not None
        linked = sum(1 for block in self.blocks.values() for _ in self._children(block))
        linked += sum(1 for first in self._orphans.values() for _ in _ring(first))
        assert linked == len(self.blocks)


def _ring(first: Block) -> Iterator[Block]:
    block = first
    while True:
        yield block
        block = block.siblings[1]
        if block is first:
            return


def _join(first: Block | None, block: Block) -> Block:
    """Put `block` into the ring that begins with `first`; returns the ring's first."""
    if first is None:
        block.siblings = (block, block)
        return block
    last = first.siblings[0]
    block.siblings = (last, first)
    last.siblings = (last.siblings[0], block)
    first.siblings = (block, first.siblings[1])
    return first


def _leave(block: Block) -> Block | None:
    """Take `block` out of its ring; returns a block that stays, if any."""
    previous, following = block.siblings
    if following is block:
        return None
    previous.siblings = (previous.siblings[0], following)
    following.siblings = (previous, following.siblings[1])
    block.siblings = (block, block)
    return following
