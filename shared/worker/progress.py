"""Whoever holds a request says so: Progress on the gateway's token subject, twice a second."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

from shared.bus.base import Bus
from shared.errors import BusClosed, BusError
from shared.messages.codec import encode
from shared.messages.session import HeldRequest, Progress
from shared.messages.subjects import Subjects
from shared.types import InstanceId

EVERY_S = 0.5
MAX_PER_MESSAGE = 1024

Held = Callable[[], Iterable[tuple[InstanceId, HeldRequest]]]
"""(gateway, request) of everything held now."""


async def report_progress(
    bus: Bus, subjects: Subjects, instance: Callable[[], InstanceId], role: Literal["router", "prefill", "decode"], held: Held
) -> None:
    """For ever: tell each gateway which of its requests are held here."""
    while True:
        await asyncio.sleep(EVERY_S)
        by_gateway: defaultdict[InstanceId, list[HeldRequest]] = defaultdict(list)
        for gateway, request in held():
            by_gateway[gateway].append(request)
        for gateway, requests in by_gateway.items():
            for at in range(0, len(requests), MAX_PER_MESSAGE):
                progress = Progress(instance(), role, requests[at : at + MAX_PER_MESSAGE])
                try:
                    await bus.publish(subjects.tokens(gateway), encode(progress))
                except BusClosed:
                    raise
                except BusError:  # cut off: the gateway's clock stands still too, the next report comes soon
                    break
