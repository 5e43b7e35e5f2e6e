"""What the store tells the routers: changes gathered into batches, and snapshots by the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby

from services.kvstore.tiers.index import Block
from shared.messages.kv import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from shared.types import KEY_BYTES, Tier

_RUN_BLOCKS = 16_384
"""Blocks in one batch at most: 16 bytes each, well below what a message may have."""


class KvEvents:
    """Changes since the last batch, in order. `sequence` goes up by one a batch."""

    def __init__(self, host: str, epoch: int) -> None:
        self.host = host
        self.epoch = epoch
        self.sequence = 0
        self._pending: list[tuple[Tier, bool, Block]] = []
        self._num_evicted = 0
        self.on_change: Callable[[], None] = lambda: None
        """Something is pending."""

    def stored(self, tier: Tier, block: Block) -> None:
        self._pending.append((tier, True, block))
        self.on_change()

    def removed(self, tier: Tier, block: Block, *, evicted: bool) -> None:
        self._pending.append((tier, False, block))
        self._num_evicted += evicted
        self.on_change()

    def take_num_evicted(self) -> int:
        """Blocks evicted (not dropped) since the last call."""
        taken, self._num_evicted = self._num_evicted, 0
        return taken

    def batches(self) -> list[KvEventBatch]:
        """Everything pending, one batch a model (they are few); pending is empty afterwards."""
        pending, self._pending = self._pending, []
        made = []
        for start in range(0, len(pending), _RUN_BLOCKS):
            part = pending[start : start + _RUN_BLOCKS]
            for model, changes in groupby(part, key=lambda change: change[2].model_digest):
                self.sequence += 1
                events = _events(list(changes))
                made.append(KvEventBatch(self.host, "host", model.hex()[:16], self.epoch, self.sequence, events))
        return made


def _events(changes: list[tuple[Tier, bool, Block]]) -> list[KvEvent]:
    events: list[KvEvent] = []
    for (tier, stored), group in groupby(changes, key=lambda change: change[:2]):
        blocks = [block for _, _, block in group]
        if stored:
            events.extend(chains(tier, blocks))
        else:
            events.append(BlocksRemoved(tier, b"".join(block.key for block in blocks)))
    return events


def chains(tier: Tier, blocks: Iterable[Block]) -> list[BlocksStored]:
    """Blocks in order → runs in which each is the next one's parent."""
    runs: list[tuple[bytes, list[bytes]]] = []
    last = b""
    for block in blocks:
        if runs and block.parent_digest == last:
            runs[-1][1].append(block.key)
        else:
            runs.append((block.parent_digest[:KEY_BYTES], [block.key]))
        last = block.digest
    return [BlocksStored(tier, parent, b"".join(keys)) for parent, keys in runs]
