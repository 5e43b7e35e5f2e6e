"""The SSD's file: room set aside by the segment, read and written past the page cache where the file system allows it. Blocking calls."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from shared.errors import EnvironmentFault
from shared.kv.slot import ALIGNMENT

SLAB = "slab"
_FLOOR = 0.05
"""The part of the file system that is left free."""


class SlabFile:
    """`is_direct`: O_DIRECT works here; else reads and writes are buffered (counted by the tier) and dropped from the page cache after."""

    def __init__(self, fd: int, *, is_direct: bool) -> None:
        self._fd = fd
        self.is_direct = is_direct

    def set_aside(self, offset: int, num_bytes: int) -> None:
        """Make sure that the range has room on the disk. Raises OSError (ENOSPC)."""
        os.posix_fallocate(self._fd, offset, num_bytes)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        """Fill the page-aligned `buffers`, one after the other; returns bytes read (fewer at the end of the file)."""
        num_bytes = os.preadv(self._fd, buffers, offset)
        self._forget(offset, num_bytes)
        return num_bytes

    def write(self, offset: int, buffer: memoryview) -> None:
        """Write a page-aligned buffer. Raises OSError; a short write counts as EIO."""
        if os.pwritev(self._fd, [buffer], offset) != len(buffer):
            raise OSError(errno.EIO, "short write")
        self._forget(offset, len(buffer))

    def _forget(self, offset: int, num_bytes: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def num_free_bytes(self) -> tuple[int, int]:
        """(free, total) bytes of the file system."""
        room = os.fstatvfs(self._fd)
        return room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def aligned_buffer(num_bytes: int = ALIGNMENT) -> memoryview:
    """Page-aligned memory of our own."""
    return memoryview(mmap.mmap(-1, num_bytes))


def check_folder(directory: Path) -> None:
    """Make the folder, or refuse one that others could tamper with. Raises EnvironmentFault."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise EnvironmentFault(f"the SSD tier's folder {directory} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise EnvironmentFault(
            f"the SSD tier's folder {directory} is a link, belongs to somebody else, or others can write it",
            remedy=f"chmod 700 {directory}",
        )


def open_private(path: Path, flags: int = 0) -> int:
    """Open or make a regular file that only we can touch, locked for us alone. Raises EnvironmentFault."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be opened: {error.strerror}") from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077 or found.st_nlink != 1:
        os.close(fd)
        raise EnvironmentFault(f"{path} is not a private file of ours", remedy="remove it")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise EnvironmentFault(f"another kvstore uses {path}") from error
    return fd


def open_slab(directory: Path) -> SlabFile:
    """The slab, with O_DIRECT if reading a page so works."""
    path = directory / SLAB
    fd = open_private(path)
    with contextlib.suppress(OSError):
        direct = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.preadv(direct, [aligned_buffer()], 0)
        except OSError:
            os.close(direct)
            raise
        fcntl.flock(fd, fcntl.LOCK_UN)
        fcntl.flock(direct, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        return SlabFile(direct, is_direct=True)
    return SlabFile(fd, is_direct=False)


def set_aside_above_floor(slab: SlabFile, offset: int, num_bytes: int) -> bool:
    """Set room aside if the file system keeps its floor free then. False: it has not so much."""
    try:
        free, total = slab.num_free_bytes()
        if free - num_bytes < _FLOOR * total:
            return False
        slab.set_aside(offset, num_bytes)
    except OSError:
        return False
    return True
