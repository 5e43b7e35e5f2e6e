"""A worker's hold on its host's arena: the mapping, and the lock that proves that the worker lives."""

from __future__ import annotations

import logging
from pathlib import Path

from shared.errors import EnvironmentFault
from shared.kv.arena import ARENA, Arena, open_arena
from shared.kv.slot_writer import WriterLock

_log = logging.getLogger(__name__)


class Attachment:
    """`arena` is None while there is none. An arena that the store has replaced stays mapped until nobody copies from it."""

    def __init__(self, directory: Path | None, instance: str) -> None:
        self._directory = directory
        self._instance = instance
        self.arena: Arena | None = None
        self._lock: WriterLock | None = None
        self._retired: list[Arena] = []
        self._has_said_absent = False

    def attach(self) -> None:
        """Map the arena, if there is one, and hold our writer's lock beside it. Blocks. No store is no fault."""
        if self._directory is None or self.arena is not None:
            return
        try:
            arena = open_arena(self._directory)
        except EnvironmentFault as fault:
            if not self._has_said_absent:
                _log.info("no KV store on this host: %s", fault)
            self._has_said_absent = True
            return
        try:
            if self._lock is None:
                self._lock = WriterLock(self._directory, self._instance)
        except OSError as error:
            arena.close()
            _log.warning("the KV store is not used, because its writers/ cannot be: %s", error)
            return
        self.arena = arena
        self._has_said_absent = False

    def check(self) -> None:
        """Let go of an arena that is not the one in the folder any more."""
        if self.arena is None or self._directory is None:
            return
        try:
            is_same = (self._directory / ARENA).stat().st_ino == self.arena.inode
        except OSError:
            is_same = False
        if not is_same:
            self._retired.append(self.arena)
            self.arena = None

    def unmap_retired(self) -> None:
        """When no copy is under way."""
        for arena in self._retired:
            arena.close()
        self._retired = []

    def close(self) -> None:
        """Unmap all and free the lock: this writer writes no more. Idempotent."""
        self.unmap_retired()
        if self.arena is not None:
            self.arena.close()
            self.arena = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
