"""The index against what sources really hold, under loss, duplication, reordering and restarts: once its snapshots are in, it is right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.router.index import PrefixIndex
from services.router.source import Holder
from shared.messages.kv import BlocksCleared, BlocksRemoved, BlocksStored, KvEventBatch, KvSnapshot

NAMES = ("aaaaaaaa", "bbbbbbbb")
KEYS = [bytes([number]) * 16 for number in range(8)]


class Source:
    """A worker or host: what it holds, and how it tells."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.epoch = 1
        self.sequence = 0
        self.held: set[bytes] = set()

    def event(self, *events: BlocksStored | BlocksRemoved | BlocksCleared) -> KvEventBatch:
        self.sequence += 1
        return KvEventBatch(self.name, "host", "", self.epoch, self.sequence, list(events))

    def snapshot(self) -> KvSnapshot:
        stored = [BlocksStored("dram", b"", b"".join(sorted(self.held)))] if self.held else []
        return KvSnapshot(self.name, self.epoch, self.sequence, stored)


class Events(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index = PrefixIndex()
        self.sources = {name: Source(name) for name in NAMES}
        self.in_flight: list[KvEventBatch] = []
        self.told: list[KvEventBatch] = []
        self.wanted: set[str] = set(NAMES)

    @rule(name=st.sampled_from(NAMES), keys=st.sets(st.sampled_from(KEYS), min_size=1), stores=st.booleans(), is_lost=st.booleans())
    def change(self, name: str, keys: set[bytes], stores: bool, is_lost: bool) -> None:
        source = self.sources[name]
        packed = b"".join(sorted(keys))
        if stores:
            source.held |= keys
            batch = source.event(BlocksStored("dram", b"", packed))
        else:
            source.held -= keys
            batch = source.event(BlocksRemoved("dram", packed))
        if not is_lost:
            self.in_flight.append(batch)

    @rule(name=st.sampled_from(NAMES))
    def restart(self, name: str) -> None:
        source = self.sources[name]
        source.epoch, source.sequence, source.held = source.epoch + 1, 0, set()

    @rule(name=st.sampled_from(NAMES))
    def clear(self, name: str) -> None:
        self.sources[name].held.clear()
        self.in_flight.append(self.sources[name].event(BlocksCleared()))

    @rule(data=st.data(), is_doubled=st.booleans())
    def deliver(self, data: st.DataObject, is_doubled: bool) -> None:
        if self.in_flight:
            at = data.draw(st.integers(0, len(self.in_flight) - 1))
            batch = self.in_flight[at] if is_doubled else self.in_flight.pop(at)
            if not self.index.apply(batch):
                self.wanted.add(batch.source)

    @rule()
    def settle(self) -> None:
        """All that is under way arrives, each source says one more thing, and the snapshots that are wanted are fetched."""
        for batch in self.in_flight:
            if not self.index.apply(batch):
                self.wanted.add(batch.source)
        self.in_flight.clear()
        for source in self.sources.values():
            if not self.index.apply(source.event()):
                self.wanted.add(source.name)
            if source.name in self.wanted or self.index.state_of(source.name) != "EXACT":
                assert self.index.install(source.name, [source.snapshot()])
                self.wanted.discard(source.name)
        for source in self.sources.values():
            assert self.index.state_of(source.name) == "EXACT"
            for key in KEYS:
                assert (Holder(source.name, "dram") in self.index.overlap([key])) == (key in source.held)

    @invariant()
    def agrees_with_itself(self) -> None:
        dump = self.index.dump()
        keys = {key for tiers in dump.values() for held in tiers.values() for key in held}
        assert len(self.index) == len(keys)


Events.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEvents = Events.TestCase


def test_the_run_of_each_holder_is_its_own() -> None:
    index = PrefixIndex()
    for name, count in (("aaaaaaaa", 2), ("bbbbbbbb", 5)):
        assert index.install(name, [KvSnapshot(name, 1, 0, [BlocksStored("device", b"", b"".join(KEYS[:count]))])])
    assert index.overlap(KEYS) == {Holder("aaaaaaaa", "device"): 2, Holder("bbbbbbbb", "device"): 5}
    assert index.overlap(KEYS[3:]) == {Holder("bbbbbbbb", "device"): 2}
    assert index.overlap([b"x" * 16, *KEYS]) == {}


def test_a_source_that_is_dropped_leaves_nothing_and_its_bit_is_used_again() -> None:
    index = PrefixIndex()
    for number in range(50):
        name = f"{number:08x}"
        assert index.install(name, [KvSnapshot(name, 1, 0, [BlocksStored("device", b"", KEYS[0])])])
        index.drop(name)
    assert len(index) == 0
    assert index.overlap(KEYS) == {}
    assert index.install("aaaaaaaa", [KvSnapshot("aaaaaaaa", 1, 0, [BlocksStored("device", b"", KEYS[0])])])
    assert index.overlap(KEYS) == {Holder("aaaaaaaa", "device"): 1}


def test_a_dead_epoch_and_a_flood_are_rejected() -> None:
    index = PrefixIndex()
    assert index.install("aaaaaaaa", [KvSnapshot("aaaaaaaa", 5, 0, [BlocksStored("device", b"", KEYS[0])])])
    assert index.apply(KvEventBatch("aaaaaaaa", "worker", "", 4, 9, [BlocksCleared()]))
    flood = bytes(16) * 70_000
    assert index.apply(KvEventBatch("aaaaaaaa", "worker", "", 5, 1, [BlocksStored("device", b"", flood)]))
    assert index.num_rejected == 2
    assert index.overlap(KEYS[:1]) == {Holder("aaaaaaaa", "device"): 1}
