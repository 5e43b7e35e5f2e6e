"""Leases, and the time they run by."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.bus.base import Bus
from shared.messages.codec import encode
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects


class Clock:
    """Monotonic seconds that go on only when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def make_lease(instance: str = "aaaaaaaa", **fields: Any) -> WorkerLease:
    """A ready decode worker, unless `fields` say otherwise."""
    lease = WorkerLease(
        instance=instance, role="decode", name="decode-0", state="ready", sequence=1, version="0", started_at_ns=1, model="0123456789abcdef"
    )
    return msgspec.structs.replace(lease, **fields)


async def put_lease(bus: Bus, subjects: Subjects, lease: WorkerLease) -> None:
    """What its process would do."""
    await (await bus.bucket(subjects.bucket("workers"))).put(f"{lease.role}.{lease.instance}", encode(lease))
