"""How the room of a tier is shared out: segments → extents → slots, one size class a layout. Plain integers."""

from __future__ import annotations

from collections.abc import Callable

from shared.errors import KvError, LayoutMismatch
from shared.kv.arena import Extent
from shared.kv.slot import slot_bytes

_WASTE = 1 / 32
_MAX_SEGMENTS = 8

SaveExtent = Callable[[Extent, bool], bool]
"""(extent, whether it is in use now): makes the change last. False: the extent cannot be used now."""


class SizeClass:
    """Slots of one layout. `free` holds byte offsets."""

    def __init__(self, layout: str, block_bytes: int, extent_segments: int, slots_per_extent: int) -> None:
        self.layout = layout
        self.block_bytes = block_bytes
        self.slot_bytes = slot_bytes(block_bytes)
        self.extent_segments = extent_segments
        self.slots_per_extent = slots_per_extent
        self.free: list[int] = []
        self.num_slots = 0
        self.extents: dict[int, Extent] = {}
        """By first segment."""

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self.free)


class Segments:
    """Who has which segment. All operations are O(1) but cutting, joining and finding an extent."""

    def __init__(self, num_segments: int, segment_bytes: int, data_at: int, save: SaveExtent) -> None:
        self.num_segments = num_segments
        self.segment_bytes = segment_bytes
        self._data_at = data_at
        self._save = save
        self._owner: list[SizeClass | None] = [None] * num_segments
        self._first: list[int] = [0] * num_segments
        self.num_free = num_segments
        self.classes: dict[str, SizeClass] = {}

    @property
    def num_bytes(self) -> int:
        return self.num_segments * self.segment_bytes

    def size_class(self, layout: str, block_bytes: int) -> SizeClass:
        """The class of a layout, made at first use. Raises LayoutMismatch, or KvError if no extent could hold one block."""
        known = self.classes.get(layout)
        if known is not None:
            if known.block_bytes != block_bytes:
                raise LayoutMismatch(f"{layout} with {known.block_bytes} bytes a block", f"{layout} with {block_bytes} bytes")
            return known
        extent_segments = self._extent_segments(block_bytes)
        slots = extent_segments * self.segment_bytes // slot_bytes(block_bytes)
        made = self.classes[layout] = SizeClass(layout, block_bytes, extent_segments, slots)
        return made

    def _extent_segments(self, block_bytes: int) -> int:
        """The fewest segments that waste at most 1/32; if none of the first few does, those that waste least."""
        if block_bytes < 1:
            raise KvError(f"blocks of {block_bytes} bytes; the least is 1")
        size = slot_bytes(block_bytes)
        least = -(-size // self.segment_bytes)
        if least > self.num_segments:
            raise KvError(f"a block takes {size} bytes, the limit is the tier's {self.num_bytes}")
        most = max(least, min(_MAX_SEGMENTS, self.num_segments // 8))

        def waste(count: int) -> float:
            room = count * self.segment_bytes
            return room % size / room

        choices = range(least, most + 1)
        return next((count for count in choices if waste(count) <= _WASTE), min(choices, key=waste))

    def take_slot(self, size_class: SizeClass) -> int | None:
        """A free slot of the class, cutting a new extent if there is room; None: evict first."""
        if not size_class.free:
            self._grow(size_class)
        return size_class.free.pop() if size_class.free else None

    def give_back(self, size_class: SizeClass, offset: int) -> None:
        size_class.free.append(offset)

    def _grow(self, size_class: SizeClass) -> None:
        count = size_class.extent_segments
        if self.num_free < count:
            return
        run = 0
        for segment in range(self.num_segments):
            run = run + 1 if self._owner[segment] is None else 0
            if run == count:
                extent = Extent(segment - count + 1, count, size_class.layout, size_class.block_bytes)
                if not self._save(extent, True):
                    return
                self.adopt(size_class, extent)
                size_class.free.extend(reversed(self.slots_of(extent)))
                return

    def adopt(self, size_class: SizeClass, extent: Extent) -> None:
        """Book an extent for the class; its slots are not free yet."""
        if extent.num_segments != size_class.extent_segments or any(self._owner[extent.first : extent.first + extent.num_segments]):
            raise KvError(f"extent {extent.first} of layout {extent.layout} overlaps another or has another shape")
        for segment in range(extent.first, extent.first + extent.num_segments):
            self._owner[segment] = size_class
            self._first[segment] = extent.first
        self.num_free -= extent.num_segments
        size_class.extents[extent.first] = extent
        size_class.num_slots += size_class.slots_per_extent

    def slots_of(self, extent: Extent) -> list[int]:
        """Byte offsets of the extent's slots."""
        size = slot_bytes(extent.block_bytes)
        start = self._data_at + extent.first * self.segment_bytes
        return [start + index * size for index in range(extent.num_segments * self.segment_bytes // size)]

    def extent_of(self, offset: int) -> Extent | None:
        """The extent that a slot lies in."""
        segment = (offset - self._data_at) // self.segment_bytes
        owner = self._owner[segment]
        return owner.extents[self._first[segment]] if owner is not None else None

    def drop_extent(self, size_class: SizeClass, extent: Extent) -> None:
        """Give the extent's room to whoever asks next; none of its slots is in use."""
        gone = set(self.slots_of(extent))
        size_class.free = [offset for offset in size_class.free if offset not in gone]
        del size_class.extents[extent.first]
        size_class.num_slots -= size_class.slots_per_extent
        for segment in range(extent.first, extent.first + extent.num_segments):
            self._owner[segment] = None
        self.num_free += extent.num_segments
        self._save(extent, False)
        if not size_class.extents:
            del self.classes[size_class.layout]
