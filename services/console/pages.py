"""What all processes of a stack say on /metrics, at one moment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from shared.messages.fleet import WorkerLease
from shared.telemetry.scrape import Page, merged, read_page
from shared.types import Role


class Pages:
    """One look. `silent`: the names of those that did not answer."""

    def __init__(self, of: dict[str, tuple[Role, Page]], silent: list[str]) -> None:
        self._of = of
        self.silent = silent

    def __getitem__(self, name: str) -> Page:
        """Of one process, by its name; empty if it is silent."""
        return self._of[name][1] if name in self._of else Page([])

    def of(self, *roles: Role) -> Page:
        """Of all processes of these roles (none: of all), as one."""
        return merged([page for role, page in self._of.values() if not roles or role in roles])


async def read_pages(leases: Sequence[WorkerLease]) -> Pages:
    """Ask them all at once."""
    asked = [lease for lease in leases if lease.metrics_address]
    answers = await asyncio.gather(*(asyncio.to_thread(read_page, lease.metrics_address) for lease in asked), return_exceptions=True)
    of: dict[str, tuple[Role, Page]] = {}
    silent = []
    for lease, answer in zip(asked, answers, strict=True):
        if isinstance(answer, Page):
            of[lease.name] = (lease.role, answer)
        elif isinstance(answer, OSError):
            silent.append(lease.name)
        else:
            raise answer
    return Pages(of, silent)
