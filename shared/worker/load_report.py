"""WorkerLoad, twice a second: what corrects the routers' bookings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shared.bus.base import Bus
from shared.errors import BusClosed, BusError
from shared.messages.codec import encode
from shared.messages.fleet import EndedRequest, WorkerLoad
from shared.messages.subjects import Subjects

EVERY_S = 0.5
MAX_ENDED = 4096


class Ended:
    """Requests that ended since the last report. Kept until a report was sent, bounded."""

    def __init__(self) -> None:
        self._requests: list[EndedRequest] = []

    def add(self, request_id: str, epoch: int) -> None:
        self._requests.append(EndedRequest(request_id, epoch))
        del self._requests[:-MAX_ENDED]

    def all(self) -> list[EndedRequest]:
        return list(self._requests)

    def sent(self, count: int) -> None:
        """The first `count` were reported."""
        del self._requests[:count]


async def report_load(bus: Bus, subjects: Subjects, ended: Ended, describe: Callable[[int, list[EndedRequest]], WorkerLoad]) -> None:
    """For ever. `describe(sequence, ended)` makes the message."""
    sequence = 0
    while True:
        await asyncio.sleep(EVERY_S)
        sequence += 1
        reported = ended.all()
        load = describe(sequence, reported)
        try:
            await bus.publish(subjects.load_event(load.worker), encode(load))
        except BusClosed:
            raise
        except BusError:  # cut off: the ended ones are reported next time
            continue
        ended.sent(len(reported))


class Ewma:
    """An exponentially weighted mean; 0 until the first value."""

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = value if self.value == 0.0 else self.value + self._weight * (value - self.value)
