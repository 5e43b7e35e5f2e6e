"""Who holds which block: the exact index. Fed by KV events; the only source of overlap.

A holder is one tier of one source (a worker's device pool, a host's DRAM or SSD) and owns one bit; a block maps to the bits of its
holders. Events of a source carry epoch and sequence: a gap makes it DEGRADED until a snapshot is in. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from services.router.content import Content
from services.router.holders import HolderSets, each_bit
from services.router.source import Holder, Lengths, Runs, Source, SourceState
from services.router.table import NumberRuns, make_table
from shared.messages.kv import BlocksCleared, BlocksStored, KvEvent, KvEventBatch, KvSnapshot
from shared.types import KEY_BYTES, Tier

MAX_BUFFERED = 4096
"""Batches kept while a snapshot is fetched. More: the snapshot is asked for again."""
MAX_BLOCKS_PER_BATCH = 65_536
STEP_BLOCKS = 64
"""So many are stored or removed in some 15 us: a decision waits no longer for them."""

FEW_BITS = 8
"""So many holders are looked up one by one."""
MAX_GONE = 65_536
"""Blocks that were held and are not, remembered as such; more are swept out."""
SWEEP_FACTOR = 8
"""Slots of the table that are swept for every block of an event."""
MAX_SOURCES = 4


Steps = Generator[None, None, bool]


class PrefixIndex:
    """A block costs O(1) to store, remove or look up. That a source is gone costs O(sets of holders), however much it held."""

    def __init__(self) -> None:
        self._table = make_table()
        """Block → number of its set of holders."""
        self._sets = HolderSets(self._table)
        self._lengths = Lengths.zeros(1)
        self._sources: dict[str, Source] = {}
        self._by_bit: list[Holder | None] = []
        self._free_bits: list[int] = []
        self.version = 0
        """Changes when a holder gets or gives back its bit."""
        self.num_rejected = 0
        """Batches that were no sense: too large, of a dead epoch, unknown tiers."""

    def __len__(self) -> int:
        """Distinct blocks that somebody holds."""
        return len(self._table)

    # -- look-up -------------------------------------------------------------------------------------------------------
    def runs(self, packed_keys: bytes, num_keys: int) -> Runs:
        """[(holders, length)]: the leading run of the first `num_keys` keys at each holder that has the first; longer runs later."""
        runs: Runs = []
        alive = -1
        length = 0
        sets = self._sets.bits
        for number, end in self._table.runs(packed_keys, num_keys):
            bits = alive & sets[number]
            if bits != alive:
                if length:
                    runs.append((alive & ~bits, length))
                if not bits:
                    return runs
                alive = bits
            length = end
        if length:
            runs.append((alive, length))
        return runs

    def lengths(self, runs: Runs) -> Lengths:
        """Run lengths by bit; one 0 more at the end, for a holder that has no bit. Good until the next call."""
        num_bits = len(self._by_bit)
        if len(self._lengths.by_bit) != num_bits + 1:
            self._lengths = Lengths.zeros(num_bits + 1)
        lengths = self._lengths.by_bit
        lengths.fill(0)
        for bits, length in runs:
            if bits.bit_count() > FEW_BITS:
                packed = np.frombuffer(bits.to_bytes((num_bits + 7) // 8, "little"), dtype=np.uint8)
                lengths[np.flatnonzero(np.unpackbits(packed, bitorder="little"))] = length
                continue
            for bit in each_bit(bits):
                lengths[bit] = length
        return self._lengths

    def hosts(self, runs: Runs) -> list[str]:
        """Whose stores hold the longest run."""
        holders = self._holders(runs[-1][0] if runs else 0)
        return list(islice((holder.source for holder in holders if holder.tier != "device"), MAX_SOURCES))

    def bit(self, name: str | None, tier: Tier) -> int:
        """Of a holder, as a place in `lengths`. Good until `version` changes."""
        source = self._sources.get(name) if name is not None else None
        return source.bits.get(tier, len(self._by_bit)) if source is not None else len(self._by_bit)

    def overlap(self, keys: Sequence[bytes]) -> dict[Holder, int]:
        """Length of the leading run of `keys` at every holder that has the first."""
        lengths = self.lengths(self.runs(b"".join(keys), len(keys))).by_bit
        return {holder: int(lengths[bit]) for bit, holder in enumerate(self._by_bit) if holder is not None and lengths[bit]}

    def is_gone(self, key: bytes) -> bool:
        """Whether somebody had the block, and nobody has it now."""
        return any(number and not self._sets.bits[number] for number, _ in self._table.all_runs(key))

    # -- events --------------------------------------------------------------------------------------------------------
    def apply(self, batch: KvEventBatch) -> bool:
        """Take a batch. False: the source is DEGRADED now (or still), and a snapshot of it is needed."""
        return finish(self.applying(batch))

    def install(self, name: str, pages: Sequence[KvSnapshot]) -> bool:
        """Replace what is known of a source by its snapshot, then apply the batches that came meanwhile. False: one of them is missing."""
        return finish(self.installing(name, pages))

    def applying(self, batch: KvEventBatch) -> Steps:
        """`apply` in steps of at most STEP_BLOCKS, between which anything else may be done to the index."""
        if not is_sane(batch.events):
            self.num_rejected += 1
            return True
        source = self._source(batch.source)
        if batch.epoch < source.epoch:
            self.num_rejected += 1
            return True
        if source.state == "EXACT" and batch.epoch == source.epoch:
            if batch.sequence <= source.sequence:
                return True  # a duplicate
            if batch.sequence == source.sequence + 1:
                source.sequence = batch.sequence
                yield from self._applying(source, batch.events)
                return True
        if batch.epoch > source.epoch and batch.sequence == 1:
            self._clear(source)  # a fresh start: nothing came before this batch
            source.epoch, source.sequence, source.state = batch.epoch, 1, "EXACT"
            yield from self._applying(source, batch.events)
            return True
        source.state = "DEGRADED"
        source.buffered.append(batch)
        del source.buffered[:-MAX_BUFFERED]
        return False

    def installing(self, name: str, pages: Sequence[KvSnapshot]) -> Steps:
        """`install` in steps of at most STEP_BLOCKS; batches that come meanwhile are kept until its end."""
        source = self._source(name)
        first = pages[0]
        if not all(is_sane(page.entries) for page in pages):
            self.num_rejected += 1
            return False
        if first.epoch < source.epoch or any(page.epoch != first.epoch for page in pages):
            return False
        self._clear(source)
        source.epoch, source.state = first.epoch, "DEGRADED"
        for page in pages:
            is_whole = yield from self._applying(source, page.entries)
            if not is_whole:
                return False
        source.sequence, source.state = first.sequence, "EXACT"
        buffered, source.buffered = source.buffered, []
        is_whole = True
        for batch in buffered:  # every one, even behind a gap: those are kept for the next snapshot
            is_whole = self.apply(batch) and is_whole
        return is_whole

    def drop(self, name: str) -> None:
        """A source is gone with all it held."""
        source = self._sources.pop(name, None)
        if source is not None:
            self._clear(source)
            for bit in source.bits.values():
                self._by_bit[bit] = None
                self._free_bits.append(bit)
            self.version += 1

    def state_of(self, name: str) -> SourceState | None:
        source = self._sources.get(name)
        return source.state if source else None

    @property
    def num_degraded(self) -> int:
        """Sources whose snapshot is not in."""
        return sum(source.state == "DEGRADED" for source in self._sources.values())

    def num_blocks(self, name: str, tier: Tier) -> int:
        return self.summary().get(name, {}).get(tier, 0)

    def summary(self) -> dict[str, dict[str, int]]:
        """Source → tier → number of blocks."""
        found: dict[str, dict[str, int]] = {name: dict.fromkeys(source.bits, 0) for name, source in self._sources.items()}
        for bits, count in self._sets.counts():
            for holder in self._holders(bits) if count else ():
                found[holder.source][holder.tier] += count
        return found

    def content(self) -> Content:
        """Everything as it is now, in one go: some ms for a million blocks."""
        sources = {name: (source.epoch, source.sequence) if source.state == "EXACT" else None for name, source in self._sources.items()}
        return Content(*self._table.content(), self._sets.bits.copy(), self._by_bit.copy(), sources)

    def dump(self) -> dict[str, dict[str, list[str]]]:
        """Everything, sorted: source → tier → keys in hex."""
        return self.content().dump()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _source(self, name: str) -> Source:
        source = self._sources.get(name)
        if source is None:
            source = self._sources[name] = Source(name)
        return source

    def _applying(self, source: Source, events: Iterable[KvEvent]) -> Steps:
        """False: the source went, or began anew, between two steps, and the rest is of no use."""
        began, is_begun = source.num_clears, False
        for event in events:
            if isinstance(event, BlocksCleared):
                self._clear(source)
                began = source.num_clears
                continue
            change = self._store if isinstance(event, BlocksStored) else self._remove
            for at in range(0, len(event.block_keys), STEP_BLOCKS * KEY_BYTES):
                if is_begun:
                    yield
                    if self._sources.get(source.name) is not source or source.num_clears != began:
                        return False
                change(source, event.tier, event.block_keys[at : at + STEP_BLOCKS * KEY_BYTES])
                is_begun = True
        return True

    def _store(self, source: Source, tier: Tier, packed: bytes) -> None:
        mask = 1 << self._bit(source, tier)
        runs = self._table.all_runs(packed)
        self._assign(packed, runs, [self._sets.bits[number] | mask for number, _ in runs])

    def _remove(self, source: Source, tier: Tier, packed: bytes) -> None:
        mask = ~(1 << self._bit(source, tier))
        runs = self._table.all_runs(packed)
        self._assign(packed, runs, [self._sets.bits[number] & mask for number, _ in runs])

    def _assign(self, packed: bytes, runs: NumberRuns, after: Sequence[int]) -> None:
        """Give the blocks of each run another set of holders, and clean up some of what nobody holds."""
        is_changed = False
        for at, bits in enumerate(after):
            number, end = runs[at]
            if bits != self._sets.bits[number]:
                runs[at] = (self._sets.number(bits), end)
                is_changed = True
        if is_changed:
            self._table.assign(packed, runs)
        if self._table.num_gone > MAX_GONE:
            self._table.sweep(SWEEP_FACTOR * len(packed) // KEY_BYTES)
        self._sets.reclaim()

    def _clear(self, source: Source) -> None:
        """It holds nothing any more."""
        source.num_clears += 1
        self._sets.remove(sum(1 << bit for bit in source.bits.values()))

    def _holders(self, bits: int) -> Iterator[Holder]:
        return (holder for bit in each_bit(bits) if (holder := self._by_bit[bit]) is not None)

    def _bit(self, source: Source, tier: Tier) -> int:
        bit = source.bits.get(tier)
        if bit is None:
            bit = self._free_bits.pop() if self._free_bits else len(self._by_bit)
            if bit == len(self._by_bit):
                self._by_bit.append(None)
            self._by_bit[bit] = Holder(source.name, tier)
            source.bits[tier] = bit
            self.version += 1
        return bit


def finish(steps: Steps) -> bool:
    """All of them at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)


def is_sane(events: Sequence[KvEvent]) -> bool:
    """Whole keys, and not more of them than any source would send at once."""
    lengths = [len(event.block_keys) for event in events if not isinstance(event, BlocksCleared)]
    return sum(lengths) <= MAX_BLOCKS_PER_BATCH * KEY_BYTES and not any(length % KEY_BYTES for length in lengths)
