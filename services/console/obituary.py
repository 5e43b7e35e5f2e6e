"""Tells the fleet at once that a process has ended. Without word of it, readers of leases wait for 3 s before they call somebody lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from services.console.fleet_view import visit
from services.console.run_folder import Run
from shared.errors import MalformedMessage, SlipstreamError
from shared.messages.codec import decode
from shared.messages.fleet import WorkerLease
from shared.tasks import cancel_all

log = logging.getLogger(__name__)


class Obituaries:
    """`tell` returns at once. Where NATS cannot be reached nothing is lost: the lease ends by itself.

    `users`: a role's NATS user and its password file. A lease is deleted as its own service would; nobody else may.
    """

    def __init__(self, run: Run, users: Mapping[str, tuple[str, Path | None]]) -> None:
        self._run = run
        self._users = users
        self._telling: set[asyncio.Task[None]] = set()

    def tell(self, name: str, role: str) -> None:
        """The process of this name has just ended."""
        user, password_file = self._users.get(role, (self._run.nats_user, self._run.nats_password_file))
        visitor = msgspec.structs.replace(self._run, nats_user=user, nats_password_file=password_file)
        task = asyncio.create_task(self._tell(visitor, name, time.time_ns()), name=f"obituary-{name}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """Leave untold what is not told yet."""
        await cancel_all(self._telling)

    async def _tell(self, visitor: Run, name: str, ended_ns: int) -> None:
        """Delete its leases. That of the life that follows began later."""
        try:
            async with visit(visitor) as (bus, subjects):
                bucket = await bus.bucket(subjects.bucket("workers"))
                for entry in await bucket.entries():
                    with contextlib.suppress(MalformedMessage):
                        lease = decode(WorkerLease, entry.value or b"")
                        if lease.name == name and lease.started_at_ns < ended_ns:
                            await bucket.delete(entry.key)
        except SlipstreamError as error:
            log.info("the end of %s could not be told: %s", name, error)
