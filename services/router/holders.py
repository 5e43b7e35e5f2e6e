"""Sets of holders and their numbers: a set is an int, one bit a holder; a block's place in the table keeps the number only."""

from __future__ import annotations

from collections.abc import Iterator

from services.router.table import BlockTable

MAX_SETS = 65_536
"""Sets that may be numbered before those out of use give back their numbers."""
GONE = 1
"""The number of blocks that somebody held, and nobody does."""


class HolderSets:
    """Tells the table which numbers stand for nobody."""

    def __init__(self, table: BlockTable, max_sets: int = MAX_SETS) -> None:
        self._table = table
        self._max_sets = max_sets
        self.bits: list[int] = [0, 0]
        """Number → set. Once a holder is gone, several numbers may have the same."""
        self._numbers: dict[int, int] = {0: GONE}
        """The other way round, one for each."""
        self._free: list[int] = []
        table.mark(GONE, True)

    def number(self, bits: int) -> int:
        """Of a set, a new one if it has none."""
        number = self._numbers.get(bits)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self.bits[number] = bits
        else:
            number = len(self.bits)
            self.bits.append(bits)
        self._numbers[bits] = number
        return number

    def remove(self, mask: int) -> None:
        """These holders have nothing any more. Costs a look at every set, and none at blocks."""
        for number, bits in enumerate(self.bits) if mask else ():
            if not bits & mask:
                continue
            if self._numbers.get(bits) == number:
                del self._numbers[bits]
            left = self.bits[number] = bits & ~mask
            self._numbers.setdefault(left, number)
            if not left:
                self._table.mark(number, True)

    def reclaim(self) -> None:
        """If there are too many: the numbers that no block has may be given again."""
        if len(self.bits) <= self._max_sets or self._free:
            return
        for number, count in enumerate(self._table.counts(len(self.bits))):
            if number <= GONE or count:
                continue
            if self._numbers.get(self.bits[number]) == number:
                del self._numbers[self.bits[number]]
            self.bits[number] = 0
            self._table.mark(number, False)
            self._free.append(number)
        if len(self._free) < len(self.bits) // 2:
            self._max_sets *= 2

    def counts(self) -> Iterator[tuple[int, int]]:
        """(set, number of blocks that it holds)"""
        return zip(self.bits, self._table.counts(len(self.bits)), strict=True)


def each_bit(bits: int) -> Iterator[int]:
    """The places of those that are set, the lowest first."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
