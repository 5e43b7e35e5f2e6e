"""The SSD tier's index as a file: what was cut, put and given up, in order. Blocking calls.

A record is its length (u32), the xxh3 of its bytes (u64) and a msgpack struct. A torn or damaged record ends the replay: what comes after
it is forgotten, and whatever the index then believes is checked against the slots themselves at every read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from services.kvstore.tiers.slab import open_private

JOURNAL = "journal"
_MAGIC = b"SSJOURN\x01"
_FRAME = struct.Struct("<IQ")
_MAX_RECORD_BYTES = 4096


class Geometry(msgspec.Struct, frozen=True, array_like=True, tag="geometry"):
    """The first record."""

    segment_bytes: int


class ExtentCut(msgspec.Struct, frozen=True, array_like=True, tag="cut"):
    """An extent is cut into slots of this layout."""

    first: int
    num_segments: int
    layout: str
    block_bytes: int


class ExtentFreed(msgspec.Struct, frozen=True, array_like=True, tag="freed"):
    """An extent is anybody's again."""

    first: int


class BlockPut(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """A slot holds this block, written whole before this record."""

    offset: int
    layout: str
    digest: bytes
    parent: bytes
    model_digest: bytes
    tenant: str


class BlockGone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """A slot holds nothing any more; written before the slot is used again."""

    offset: int


Record = Geometry | ExtentCut | ExtentFreed | BlockPut | BlockGone
_decoder = msgspec.msgpack.Decoder(Record)
_encoder = msgspec.msgpack.Encoder()


def _frame(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _FRAME.pack(len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def fold(records: Iterable[Record]) -> tuple[dict[int, ExtentCut], dict[int, BlockPut]]:
    """What all records come to: extents by first segment, blocks by offset."""
    held: dict[int, BlockPut] = {}
    extents: dict[int, ExtentCut] = {}
    for record in records:
        match record:
            case ExtentCut():
                extents[record.first] = record
            case ExtentFreed():
                extents.pop(record.first, None)
            case BlockPut():
                held[record.offset] = record
            case BlockGone():
                held.pop(record.offset, None)
    return extents, held


class Journal:
    """Append-only; `rewrite` replaces it by an equivalent short one."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL
        self._fd = open_private(self._path, os.O_APPEND)
        self.num_records = 0

    def replay(self) -> Iterator[Record]:
        """All whole records; the file is cut behind the last one."""
        raw = self._path.read_bytes()
        at = len(_MAGIC)
        if raw[:at] != _MAGIC:
            os.ftruncate(self._fd, 0)
            os.write(self._fd, _MAGIC)
            return
        while at + _FRAME.size <= len(raw):
            length, checksum = _FRAME.unpack_from(raw, at)
            payload = raw[at + _FRAME.size : at + _FRAME.size + length]
            if length > _MAX_RECORD_BYTES or len(payload) < length or xxhash.xxh3_64_intdigest(payload) != checksum:
                break
            try:
                record = _decoder.decode(payload)
            except msgspec.MsgspecError:
                break
            self.num_records += 1
            at += _FRAME.size + length
            yield record
        if at < len(raw):
            os.ftruncate(self._fd, at)

    def append(self, records: Iterable[Record]) -> None:
        """All of them or none. Raises OSError."""
        frames = [_frame(record) for record in records]
        whole_bytes = os.fstat(self._fd).st_size
        try:
            _write_all(self._fd, b"".join(frames))
        except OSError:
            os.ftruncate(self._fd, whole_bytes)  # or replay would stop at the torn record, and never see what follows it
            raise
        self.num_records += len(frames)

    def rewrite(self, records: Iterable[Record]) -> None:
        """Replace the contents in one step. Raises OSError; the old file is then still there."""
        fresh = self._path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        fd = open_private(fresh, os.O_APPEND)
        frames = [_frame(record) for record in records]
        try:
            _write_all(fd, _MAGIC + b"".join(frames))
            fresh.rename(self._path)
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd
        self.num_records = len(frames)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _write_all(fd: int, data: bytes) -> None:
    """A disk that becomes full takes a part, and says so only when it is asked again."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
