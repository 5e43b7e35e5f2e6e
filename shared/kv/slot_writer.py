"""The proof that a writer is gone: an flock on `writers/<instance>`, which the kernel frees at death and not at a stop."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

WRITERS = "writers"


class WriterLock:
    """Held by a worker from before its first reservation until its process ends."""

    def __init__(self, directory: Path, instance: str) -> None:
        folder = directory / WRITERS
        folder.mkdir(mode=0o700, exist_ok=True)
        self._path = folder / instance
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Say that this writer writes no more. Idempotent."""
        if self._fd < 0:
            return
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def is_writer_gone(directory: Path, instance: str) -> bool:
    """True if nobody holds the lock: then nobody writes into the slots that `instance` reserved. A gone writer's file is removed."""
    path = directory / WRITERS / instance
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    else:
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
