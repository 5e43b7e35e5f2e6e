"""What an index held at one moment: quick to take, and unfolded by whoever has the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.router.holders import each_bit
from services.router.source import Holder
from shared.kv.hashing import split
from shared.messages.kv import BlocksStored, KvSnapshot
from shared.types import KEY_BYTES

PIECE_KEYS = 8192


class Content(NamedTuple):
    packed: bytes
    """All keys, in no order."""
    numbers: NDArray[np.uint32]
    """Each key's set of holders, by its place in `sets`."""
    sets: list[int]
    holders: list[Holder | None]
    """By bit."""
    sources: dict[str, tuple[int, int] | None]
    """Epoch and sequence of those that were EXACT; None: it was DEGRADED."""

    def by_holder(self) -> dict[Holder, bytes]:
        """Packed keys of every holder that has any."""
        if not self.packed:
            return {}
        order = np.argsort(self.numbers, kind="stable")
        numbers, begins = np.unique(self.numbers[order], return_index=True)
        parts: defaultdict[Holder, list[bytes]] = defaultdict(list)
        for number, keys in zip(numbers.tolist(), np.split(np.frombuffer(self.packed, dtype="V16")[order], begins[1:]), strict=True):
            for bit in each_bit(self.sets[number]):
                if (holder := self.holders[bit]) is not None:
                    parts[holder].append(keys.tobytes())
        return {holder: b"".join(part) for holder, part in parts.items()}

    def dump(self) -> dict[str, dict[str, list[str]]]:
        """Everything, sorted: source → tier → keys in hex. Two routers that heard the same are equal."""
        found: dict[str, dict[str, list[str]]] = {name: {} for name in sorted(self.sources)}
        for holder, packed in sorted(self.by_holder().items()):
            found[holder.source][holder.tier] = sorted(key.hex() for key in split(packed, KEY_BYTES))
        return found

    def snapshots(self) -> Iterator[KvSnapshot]:
        """Of every EXACT source, in pieces of at most PIECE_KEYS; one at least."""
        stored: dict[str, list[BlocksStored]] = {name: [] for name in self.sources}
        for holder, packed in self.by_holder().items():
            for at in range(0, len(packed), PIECE_KEYS * KEY_BYTES):
                stored[holder.source].append(BlocksStored(holder.tier, b"", packed[at : at + PIECE_KEYS * KEY_BYTES]))
        for name, state in self.sources.items():
            if state is not None:
                yield from (KvSnapshot(name, *state, entries=[entry]) for entry in stored[name])
                if not stored[name]:
                    yield KvSnapshot(name, *state, entries=[])
