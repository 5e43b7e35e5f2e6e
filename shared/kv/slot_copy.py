"""A worker's copies between its device pool and the arena's slots, with every check that makes a wrong block a miss. They block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import xxhash

from shared.kv import slot
from shared.kv.summed_copy import copy_summed

NATIVE = "native"


Verdict = Literal["", "corrupt", "lease_expired"]


class BlockDevice(Protocol):
    """The device pool (the engine). All methods block, and may run beside a forward that does not use these blocks."""

    def host_block(self, block_id: int) -> memoryview | None:
        """The block itself, writable, if it lies in this process' memory in the form that slots have."""

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None: ...

    def import_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None: ...


class BlockToStore(NamedTuple):
    """A full block of the device pool. `parent` is the hash before it (the seed before a first block); hashes have 32 bytes."""

    hash: bytes
    parent: bytes
    packed_tokens: bytes
    block_id: int
    tenant: str


class Place(NamedTuple):
    """A slot as it was lent to us."""

    offset: int
    generation: int


class Expected(NamedTuple):
    """What a slot must hold to be our block."""

    digest: bytes
    model_digest: bytes
    packed_tokens: memoryview
    num_bytes: int
    payload_format: str = NATIVE


def copy_in(
    memory: memoryview, places: Sequence[Place], expected: Sequence[Expected], block_ids: Sequence[int], device: BlockDevice
) -> tuple[int, Verdict]:
    """Slots → memory of our own → checks, block by block: the device's block itself where that can be, else a buffer and then the device.

    Returns how many leading blocks are good, and what was wrong with the first that is not; nothing of that one is left in the pool.
    """
    staging = memoryview(b"")
    for index, (place, block, block_id) in enumerate(zip(places, expected, block_ids, strict=True)):
        own = device.host_block(block_id)
        if own is None and not staging:
            staging = memoryview(bytearray(max(one.num_bytes for one in expected)))
        verdict = _copy_checked(memory, place, block, staging if own is None else own)
        if verdict:
            if own is not None:
                np.frombuffer(own, np.uint8).fill(0)  # attention multiplies what it masks: whatever is in a pool must be finite
            return index, verdict
        if own is None:
            device.import_blocks([block_id], [staging])
    return len(places), ""


def _copy_checked(memory: memoryview, place: Place, expected: Expected, target: memoryview) -> Verdict:
    """Copy a slot's payload into `target` and say whether that is exactly the block: header, checksum of the copy, generation after it."""
    if place.offset + slot.HEADER_BYTES + expected.num_bytes > len(memory):
        return "corrupt"
    header = slot.read_header(memory, place.offset)
    is_whole = (
        header.digest == expected.digest
        and header.model_digest == expected.model_digest
        and header.length == expected.num_bytes
        and header.format == expected.payload_format
        and slot.tokens(memory, place.offset) == expected.packed_tokens
    )
    if is_whole:
        is_whole = copy_summed(target, slot.payload(memory, place.offset, expected.num_bytes)) == header.checksum
    if slot.read_state(memory, place.offset) != (place.generation, slot.SlotState.COMMITTED):
        return "lease_expired"
    return "" if is_whole else "corrupt"


def copy_out(
    memory: memoryview,
    places: Sequence[Place],
    blocks: Sequence[BlockToStore],
    num_bytes: int,
    writer: str,
    device: BlockDevice,
    payload_format: str = NATIVE,
) -> bool:
    """Device pool → slots, then their headers. False if a slot is not ours any more: our lease ran out while we stood still."""
    if not _are_ours(memory, places):
        return False
    payloads = [slot.payload(memory, place.offset, num_bytes) for place in places]
    own = [device.host_block(block.block_id) for block in blocks]
    if None in own:
        device.export_blocks([block.block_id for block in blocks], payloads)  # all at once: each copy from a GPU has its price
    for place, block, payload, source in zip(places, blocks, payloads, own, strict=True):
        slot.write_content(
            memory,
            place.offset,
            writer=writer,
            packed_tokens=block.packed_tokens,
            payload_format=payload_format,
            length=num_bytes,
            checksum=xxhash.xxh3_64_intdigest(payload) if source is None else copy_summed(payload, source),
        )
    return _are_ours(memory, places)


def _are_ours(memory: memoryview, places: Sequence[Place]) -> bool:
    return all(slot.read_state(memory, place.offset) == (place.generation, slot.SlotState.RESERVED) for place in places)
