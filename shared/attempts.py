"""Which attempts of requests may still be worked on: cancels are remembered, and a doubtful attempt is asked about.

JetStream only redelivers; the gateway alone decides. Used by routers and workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from shared.bus.base import Bus, Delivery
from shared.errors import BusError, LinkDown, MalformedMessage
from shared.messages.codec import decode, encode
from shared.messages.request import Cancel, GenerateRequest
from shared.messages.session import Wanted, WantedReply
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import InstanceId

REMEMBER_S = 60.0
DOUBTFUL_AGE_S = 1.0
"""A message older than this may have been cancelled before we listened."""
YOUNG_S = 5.0
"""In its first seconds a process may have missed cancels."""
ASK_S = 1.0
LINK_RETRY_S = 0.25

log = logging.getLogger(__name__)

OnCancel = Callable[[Cancel], None]


class Attempts:
    """The cancels of the last 60 s, and the question whether an attempt is wanted. Times are of `monotonic`, injected."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry, monotonic: Callable[[], float]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._born_s = monotonic()
        self._epochs: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """request_id → (when heard, every attempt up to this epoch is cancelled), oldest first."""
        self._instances: OrderedDict[tuple[str, int, str], float] = OrderedDict()
        """(request_id, epoch, instance) → when heard: that instance's attempt only."""

    async def follow(self, on_cancel: OnCancel) -> None:
        """Listen for cancels for ever; each is remembered, then given to `on_cancel`."""
        async for message in await self._bus.subscribe(self._subjects.cancel()):
            try:
                cancel = decode(Cancel, message.payload)
            except MalformedMessage as error:
                self._telemetry.count("malformed_messages", kind="cancel")
                log.warning("a cancel was dropped: %s", error)
                continue
            self.remember(cancel)
            on_cancel(cancel)

    def remember(self, cancel: Cancel) -> None:
        """Keep a cancel for 60 s."""
        now_s = self._monotonic()
        if cancel.worker is not None:
            self._instances[(cancel.request_id, cancel.epoch, cancel.worker)] = now_s
        else:
            _, epoch = self._epochs.pop(cancel.request_id, (0.0, -1))
            self._epochs[cancel.request_id] = (now_s, max(epoch, cancel.epoch))
        while self._epochs and now_s - next(iter(self._epochs.values()))[0] > REMEMBER_S:
            self._epochs.popitem(last=False)
        while self._instances and now_s - next(iter(self._instances.values())) > REMEMBER_S:
            self._instances.popitem(last=False)

    def is_cancelled(self, request_id: str, epoch: int, instance: InstanceId) -> bool:
        """Whether a cancel that we heard covers this attempt by `instance`."""
        return epoch <= self._epochs.get(request_id, (0.0, -1))[1] or (request_id, epoch, instance) in self._instances

    def known(self, request: GenerateRequest, delivery: Delivery, instance: InstanceId) -> bool | None:
        """Whether to work on a request or task that has just been delivered. None: the gateway must be asked (`may_run`)."""
        if self.is_cancelled(request.request_id, request.epoch, instance):
            return False
        is_young = self._monotonic() - self._born_s < YOUNG_S
        if delivery.num_delivered == 1 and delivery.age_s <= DOUBTFUL_AGE_S and not is_young:
            return True
        return None

    async def may_run(self, request: GenerateRequest, delivery: Delivery, instance: InstanceId) -> bool:
        """`known`, or what the gateway says."""
        known = self.known(request, delivery, instance)
        if known is not None:
            return known
        wanted = await self.is_wanted(request)
        return wanted and not self.is_cancelled(request.request_id, request.epoch, instance)

    async def is_wanted(self, request: GenerateRequest) -> bool:
        """Ask the gateway. No answer: it is gone, and nobody wants the request."""
        subject = self._subjects.session(request.gateway, "wanted")
        question = encode(Wanted(request.request_id, request.epoch))
        while True:
            try:
                reply = await self._bus.request(subject, question, timeout_s=ASK_S)
                return decode(WantedReply, reply.payload).wanted
            except LinkDown:  # it is us who cannot be heard: that says nothing about the gateway
                await asyncio.sleep(LINK_RETRY_S)
            except BusError as error:
                self._telemetry.count("unwanted_attempts", reason=error.code)
                return False
