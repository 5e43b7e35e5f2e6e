"""The arena: one file on tmpfs, made by kvstore and mapped by the host's workers.

    0     magic 8s · version u32 · host id 8s · epoch u64 · num_bytes u64 · segment_bytes u64 · num_segments u32
    4096  segment table, 32 bytes a segment: layout 8s · block_bytes u64 · first segment of the extent u32 · segments in it u32
    ...   segments; an extent (usually one segment) is cut into slots of one size class

A slot is a header (`slot.py`) and the payload. Only the store writes the file's header and the table.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path
from typing import NamedTuple

from shared.errors import EnvironmentFault
from shared.kv.slot import ALIGNMENT
from shared.kv.slot_writer import WRITERS

ARENA = "arena"
_MAGIC = b"SSARENA\x01"
_VERSION = 1
_HEADER = struct.Struct("<8sI8sQQQI")
_EPOCH_AT = 20
_SEGMENT = struct.Struct("<8sQII")
_SEGMENT_STRIDE = 32
_TABLE_AT = 4096
_MAX_SEGMENT_BYTES = 64 * 2**20
_MIN_SEGMENT_BYTES = 64 * 2**10
_NUM_SEGMENTS = 128
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ArenaHeader(NamedTuple):
    """The file's header, decoded."""

    magic: bytes
    version: int
    host: bytes
    epoch: int
    num_bytes: int
    segment_bytes: int
    num_segments: int


class Extent(NamedTuple):
    """`num_segments` segments from `first` on, cut into slots of one layout."""

    first: int
    num_segments: int
    layout: str
    block_bytes: int


class Arena:
    """The mapped file. `memory` is all of it, writable; closing releases it, so slices of it must be gone before."""

    def __init__(self, fd: int, num_bytes: int, path: Path) -> None:
        self.path = path
        self._fd = fd
        self._map = _mapped(fd, num_bytes)
        self.memory = memoryview(self._map)
        self.inode = os.fstat(fd).st_ino
        header = self.header
        self.host = header.host.decode("ascii")
        self.segment_bytes = header.segment_bytes
        self.num_segments = header.num_segments
        self.data_at = _data_at(header.num_segments)

    @property
    def header(self) -> ArenaHeader:
        return ArenaHeader(*_HEADER.unpack_from(self.memory, 0))

    @property
    def epoch(self) -> int:
        """Goes up by one each time a store opens the file."""
        return self.header.epoch

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def start_epoch(self, epoch: int) -> None:
        """Store only."""
        struct.pack_into("<Q", self.memory, _EPOCH_AT, epoch)

    def extents(self) -> list[Extent]:
        """What the segment table says is in use."""
        found = []
        for segment in range(self.num_segments):
            layout, block_bytes, first, count = _SEGMENT.unpack_from(self.memory, _TABLE_AT + segment * _SEGMENT_STRIDE)
            if count and first == segment and first + count <= self.num_segments:
                found.append(Extent(first, count, layout.hex(), block_bytes))
        return found

    def save_extent(self, extent: Extent, *, in_use: bool) -> None:
        """Store only: note in the table that the extent is cut (after its slots' headers are written) or free."""
        layout = bytes.fromhex(extent.layout)
        entry = (layout, extent.block_bytes, extent.first, extent.num_segments) if in_use else (bytes(8), 0, 0, 0)
        _SEGMENT.pack_into(self.memory, _TABLE_AT + extent.first * _SEGMENT_STRIDE, *entry)

    def segment_at(self, segment: int) -> int:
        """Byte offset of a segment."""
        return self.data_at + segment * self.segment_bytes

    def close(self) -> None:
        """Unmap; if a slice of the memory is still about, the mapping goes with it. Idempotent."""
        if self._fd < 0:
            return
        self.memory.release()
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self._fd)
        self._fd = -1


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """All of the file, its pages there already. That takes seconds for a large one, and `mmap` itself would keep the interpreter for as
    long: the event loop would stand still, and the lease expire. A kernel before 5.14 knows no other way."""
    mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    first = ctypes.c_char.from_buffer(mapped)
    is_populated = _libc.madvise(ctypes.addressof(first), num_bytes, _MADV_POPULATE_READ) == 0
    del first  # a mapping that is looked into cannot be closed
    if is_populated:
        return mapped
    mapped.close()
    return mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def _data_at(num_segments: int) -> int:
    return -(-(_TABLE_AT + num_segments * _SEGMENT_STRIDE) // ALIGNMENT) * ALIGNMENT


def segment_bytes_for(num_bytes: int) -> int:
    """About 128 segments, each of 64 KiB to 64 MiB in whole 4 KiB."""
    wanted = min(max(num_bytes // _NUM_SEGMENTS, _MIN_SEGMENT_BYTES), _MAX_SEGMENT_BYTES)
    return wanted // ALIGNMENT * ALIGNMENT


def create_arena(directory: Path, num_bytes: int, host: str) -> Arena:
    """Make the file, with its room set aside and touched. Raises EnvironmentFault if there is no room, or a file already."""
    segment_bytes = segment_bytes_for(num_bytes)
    num_segments = (num_bytes - _data_at(num_bytes // segment_bytes)) // segment_bytes
    if num_segments < 1:
        raise EnvironmentFault(f"an arena of {num_bytes} bytes is too small", remedy="give --kv-dram (SS_KV_DRAM) at least 1M")
    path = directory / ARENA
    (directory / WRITERS).mkdir(mode=0o700, exist_ok=True)
    _check_room(directory, num_bytes)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise EnvironmentFault(f"{path} exists already", remedy="is another kvstore running with this SS_KV_DIR?") from error
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        os.pwrite(fd, _HEADER.pack(_MAGIC, _VERSION, host.encode(), 0, num_bytes, segment_bytes, num_segments), 0)
        return Arena(fd, num_bytes, path)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_room(directory, num_bytes) from error
        raise EnvironmentFault(f"the arena {path} cannot be made: {error.strerror}") from error


def _check_room(directory: Path, num_bytes: int) -> None:
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < num_bytes:
        raise _no_room(directory, num_bytes)


def _no_room(directory: Path, num_bytes: int) -> EnvironmentFault:
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    return EnvironmentFault(
        f"the KV arena needs {num_bytes / 2**20:.0f} MiB in {directory}, {free / 2**20:.0f} MiB are free",
        remedy="lower --kv-dram (SS_KV_DRAM), or give the tmpfs more room (docker: shm_size)",
    )


def open_arena(directory: Path) -> Arena:
    """Map an existing arena. Raises EnvironmentFault if it is absent, foreign or of another version."""
    path = directory / ARENA
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise EnvironmentFault(f"no arena at {path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
            raise EnvironmentFault(f"{path} is not a regular file that only its owner can write", remedy="remove it")
        raw = os.pread(fd, _HEADER.size, 0)
        header = ArenaHeader(*_HEADER.unpack(raw)) if len(raw) == _HEADER.size else None
        if header is None or header.magic != _MAGIC or header.version != _VERSION or header.num_bytes != found.st_size:
            raise EnvironmentFault(f"{path} is not an arena of this version", remedy="remove it")
        return Arena(fd, found.st_size, path)
    except BaseException:
        os.close(fd)
        raise


class StoreLock:
    """One store a directory: an flock that ends with the process."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
                raise EnvironmentFault(f"{directory} is not a folder that only we can write", remedy=f"chmod 700 {directory}")
            self._fd = os.open(directory / "store.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EnvironmentFault(
                f"{directory} cannot be used: {error.strerror}", remedy="set SS_KV_DIR to a private tmpfs folder"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise EnvironmentFault(f"another kvstore uses {directory}", remedy="stop it, or set another SS_KV_DIR") from error

    def close(self) -> None:
        """Let the next store in. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
