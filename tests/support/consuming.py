"""A decode worker's queue."""

from __future__ import annotations

from shared.bus.base import Bus, Consumer
from shared.messages.subjects import Subjects

WORKER = "0123abcd"


async def consume(bus: Bus, subjects: Subjects, *, window: int = 4, worker: str = WORKER) -> Consumer:
    return await bus.consume(subjects.stream("decode"), subjects.durable("decode", worker), subjects.decode(worker), window=window)
