"""WorkerLoad, twice a second and soon after a request has ended: what corrects the routers' bookings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from shared.bus.base import Bus
from shared.errors import BusClosed, BusError
from shared.messages.codec import encode
from shared.messages.fleet import EndedRequest, WorkerLoad
from shared.messages.subjects import Subjects

EVERY_S = 0.5
SOON_S = 0.02
"""How soon after the last report an ended request is told. Until then its booking keeps others waiting: at 0.5 s, and twice the slots
booked at most, eight slots would end 32 short requests a second however fast they are."""
MAX_ENDED = 4096


class Ended:
    """Requests that ended since the last report. Kept until a report was sent, bounded."""

    def __init__(self) -> None:
        self._requests: list[EndedRequest] = []
        self._some = asyncio.Event()

    def add(self, request_id: str, epoch: int) -> None:
        self._requests.append(EndedRequest(request_id, epoch))
        del self._requests[:-MAX_ENDED]
        self._some.set()

    async def wait_for_some(self, timeout_s: float) -> None:
        """Until there is one to report, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._some.wait()

    def all(self) -> list[EndedRequest]:
        return list(self._requests)

    def sent(self, count: int) -> None:
        """The first `count` were reported."""
        del self._requests[:count]
        if not self._requests:
            self._some.clear()


async def report_load(bus: Bus, subjects: Subjects, ended: Ended, describe: Callable[[int, list[EndedRequest]], WorkerLoad]) -> None:
    """For ever. `describe(sequence, ended)` makes the message."""
    sequence = 0
    while True:
        await asyncio.sleep(SOON_S)
        await ended.wait_for_some(EVERY_S - SOON_S)
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
