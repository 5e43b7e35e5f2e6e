"""The only way anything behind the gateway ends a request: Finish, repeated until it is answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from shared.bus.base import Bus
from shared.errors import BusClosed, BusError, NoResponders
from shared.fleet import Fleet
from shared.messages.codec import decode, encode
from shared.messages.session import Finish, FinishReply
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import InstanceId

ANSWER_S = 1.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

log = logging.getLogger(__name__)

Resend = Callable[[int], Awaitable[None]]
"""Send the request's tokens from this index on again."""


async def send_finish(
    bus: Bus, subjects: Subjects, fleet: Fleet, telemetry: Telemetry, gateway: InstanceId, finish: Finish, resend: Resend | None = None
) -> bool:
    """Returns True once the gateway needs nothing more of the request, False when the gateway is gone."""
    payload = encode(finish)
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            reply = await bus.request(subjects.session(gateway, "finish"), payload, timeout_s=ANSWER_S)
            answer = decode(FinishReply, reply.payload)
            if answer.done:
                return True
            if resend is not None:
                await resend(answer.resend_from)
        except BusClosed:
            raise
        except BusError as error:
            telemetry.count("finish_retries", reason=error.code)
            if isinstance(error, NoResponders) and not fleet.is_alive(gateway):
                log.warning("gateway %s is gone: request %s is dropped", gateway, finish.request_id)
                return False
        if bus.is_connected and not fleet.is_alive(gateway):
            return False
        await asyncio.sleep(pause_s)
        pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
