"""The header of one slot, as it lies in the arena and, byte for byte, on the SSD.

    0    generation u64 · state u32 · num_tokens u32 · writer 8s · format 8s · length u64 · payload xxh3 u64
    48   tenant 16s · digest 32s · parent 32s · model_digest 32s
    160  header xxh3 u64                             (over bytes 12 to 160 and the token ids; set by the store at commit)
    256  token ids, little-endian uint32
    2048 payload

The store writes generation, state, writer, tenant, digest, parent and model_digest; the writer the rest. A generation is never given
twice, so whoever holds an old one can tell that the slot has a new owner.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import xxhash

HEADER_BYTES = 2048
ALIGNMENT = 4096
OWNED_BYTES = 12
"""Generation and state: of the slot, not of the block in it."""
MAX_TOKENS = (HEADER_BYTES - 256) // 4

_TOKENS_AT = 256
_FIELDS = struct.Struct("<QII8s8sQQ16s32s32s32sQ")
_GENERATION = struct.Struct("<Q")
_STATE = struct.Struct("<QI")
_WRITTEN = struct.Struct("<I8s8sQQ")
_NUM_TOKENS_AT = 12
_CHECKSUM_AT = 160


class SlotState(IntEnum):
    """What a slot is used for."""

    FREE = 0
    RESERVED = 1
    COMMITTED = 2
    EXPIRED = 3
    """Reserved once; its writer may still write, so nobody else may have it yet."""


class SlotHeader(NamedTuple):
    """One header, decoded. Digests are 32 bytes; `checksum` is of the payload."""

    generation: int
    state: int
    num_tokens: int
    writer: str
    format: str
    length: int
    checksum: int
    tenant: str
    digest: bytes
    parent: bytes
    model_digest: bytes
    header_checksum: int


def slot_bytes(block_bytes: int) -> int:
    """Bytes a block of `block_bytes` takes with its header, in whole 4 KiB."""
    return -(-(HEADER_BYTES + block_bytes) // ALIGNMENT) * ALIGNMENT


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("ascii", "replace")


def read_header(memory: memoryview, offset: int) -> SlotHeader:
    """Decode the header at `offset`."""
    fields = _FIELDS.unpack_from(memory, offset)
    generation, state, num_tokens, writer, payload_format, length, checksum, tenant, digest, parent, model, own = fields
    return SlotHeader(
        generation, state, num_tokens, _text(writer), _text(payload_format), length, checksum, _text(tenant), digest, parent, model, own
    )


def read_state(memory: memoryview, offset: int) -> tuple[int, int]:
    """(generation, state): the cheap check before a commit and after a copy."""
    generation, state = _STATE.unpack_from(memory, offset)
    return generation, state


def write_state(memory: memoryview, offset: int, generation: int, state: SlotState) -> None:
    """Store only."""
    _STATE.pack_into(memory, offset, generation, state)


def write_owner(
    memory: memoryview, offset: int, generation: int, *, writer: str, tenant: str, digest: bytes, parent: bytes, model_digest: bytes
) -> None:
    """Store only: the slot is reserved for `writer` and this block."""
    _FIELDS.pack_into(
        memory, offset, generation, SlotState.RESERVED, 0, writer.encode(), b"", 0, 0, tenant.encode()[:16], digest, parent, model_digest, 0
    )


def write_content(
    memory: memoryview, offset: int, *, writer: str, packed_tokens: bytes | memoryview, payload_format: str, length: int, checksum: int
) -> None:
    """Writer only, after the payload: what the slot holds."""
    _WRITTEN.pack_into(memory, offset + _NUM_TOKENS_AT, len(packed_tokens) // 4, writer.encode(), payload_format.encode(), length, checksum)
    at = offset + _TOKENS_AT
    memory[at : at + len(packed_tokens)] = packed_tokens


def seal(memory: memoryview, offset: int) -> None:
    """Store only, at commit: write the header's own checksum."""
    _GENERATION.pack_into(memory, offset + _CHECKSUM_AT, header_checksum(memory, offset))


def header_checksum(memory: memoryview, offset: int) -> int:
    """xxh3 over the fields after the state and the token ids; a num_tokens beyond the header counts as none."""
    fields = xxhash.xxh3_64_intdigest(memory[offset + _NUM_TOKENS_AT : offset + _CHECKSUM_AT])
    return xxhash.xxh3_64_intdigest(tokens(memory, offset), seed=fields)


def is_sealed(memory: memoryview, offset: int) -> bool:
    """Whether the header is whole."""
    (own,) = _GENERATION.unpack_from(memory, offset + _CHECKSUM_AT)
    return bool(own == header_checksum(memory, offset))


def tokens(memory: memoryview, offset: int) -> memoryview:
    """The packed token ids, in place."""
    (num_tokens,) = struct.unpack_from("<I", memory, offset + _NUM_TOKENS_AT)
    at = offset + _TOKENS_AT
    return memory[at : at + 4 * num_tokens] if num_tokens <= MAX_TOKENS else memory[at:at]


def payload(memory: memoryview, offset: int, num_bytes: int) -> memoryview:
    """The block's bytes, in place."""
    at = offset + HEADER_BYTES
    return memory[at : at + num_bytes]
