"""sha256 of model files; large ones are hashed once and remembered by (size, time of change, inode)."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from shared.errors import ModelFault


def hash_file(path: Path) -> str:
    """sha256 of a file (hex). Raises ModelFault."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelFault(f"{path}: cannot be read: {error.strerror}", remedy="Check the file and its permissions") from error


def combine_digests(digests: dict[str, str]) -> str:
    """One digest over files: their names and sha256, in the order of the names. (hex)"""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class _Stamp(msgspec.Struct, frozen=True):
    """A file as it was when it was hashed."""

    size: int
    changed_ns: int
    inode: int
    digest: str


class FileDigests:
    """sha256 by path, remembered in `<cache_dir>/digests`. Where that cannot be written, files are hashed every time."""

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "digests"

    def known(self, path: Path) -> str | None:
        """The remembered digest, if the file is unchanged since."""
        try:
            stamp = msgspec.json.decode(self._place(path).read_bytes(), type=_Stamp)
        except (OSError, msgspec.DecodeError):
            return None
        status = path.stat()
        return stamp.digest if (stamp.size, stamp.changed_ns, stamp.inode) == _identity(status) else None

    def of(self, path: Path) -> str:
        """sha256 of the file (hex). Raises ModelFault."""
        known = self.known(path)
        if known is not None:
            return known
        before = _identity(path.stat())
        digest = hash_file(path)
        if _identity(path.stat()) == before:
            self._remember(path, _Stamp(*before, digest))
        return digest

    def _remember(self, path: Path, stamp: _Stamp) -> None:
        place = self._place(path)
        beside = place.with_suffix(f".{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(msgspec.json.encode(stamp))
            beside.replace(place)
        except OSError:  # a cache that cannot be written costs time at the next start, nothing else
            with suppress(OSError):
                beside.unlink()

    def _place(self, path: Path) -> Path:
        return self._folder / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino
