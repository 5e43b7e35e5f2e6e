"""Tasks as they come from a worker's own queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, Literal, TypeVar

from shared.attempts import Attempts
from shared.bus.base import Bus, Consumer, Delivery
from shared.bus.streams import IN_PROGRESS_S, MAX_DELIVER
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.messages.codec import decode
from shared.messages.request import DecodeTask, GenerateRequest, PrefillTask
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import InstanceId

WINDOW = 64
IN_PROGRESS_ROUND = 32
"""Deliveries told of before others have their turn."""

log = logging.getLogger(__name__)

T = TypeVar("T", PrefillTask, DecodeTask)


Take = Callable[[T, Delivery], None]
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class Intake(Generic[T]):
    """Every task addressed to `instance` is taken at once; routers bound how many there are. Malformed tasks are terminated, unwanted ones
    acked and told to `dropped`; the rest goes to `take`."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        telemetry: Telemetry,
        attempts: Attempts,
        queue: Literal["prefill", "decode"],
        task_type: type[T],
        take: Take[T],
        dropped: Callable[[GenerateRequest], None],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._attempts = attempts
        self._queue = queue
        self._task_type: type[T] = task_type
        self._take: Take[T] = take
        self._dropped = dropped
        self._consumer: Consumer | None = None
        self._closing: list[Consumer] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def open(self, instance: InstanceId, spawn: Spawn) -> None:
        """Pull the tasks of `instance` from now on."""
        subject = getattr(self._subjects, self._queue)(instance)
        self._consumer = await self._bus.consume(
            self._subjects.stream(self._queue),
            self._subjects.durable(self._queue, instance),
            subject,
            window=WINDOW,
            max_deliver=MAX_DELIVER,
        )
        spawn(self._pull(self._consumer, instance, spawn), f"{self._queue}-intake")

    def shut(self) -> None:
        """Take nothing more from this moment on."""
        if self._consumer is not None:
            self._closing.append(self._consumer)
            self._consumer = None
        for task in self._asking:
            task.cancel()

    async def close(self) -> None:
        """Shut, and delete the durable: what is queued is the gateways' to submit again."""
        self.shut()
        while self._closing:
            try:
                await self._closing.pop().close(delete=True)
            except BusClosed:
                raise
            except BusError as error:  # it goes by itself after a minute without us
                log.info("the durable could not be deleted: %s", error)

    async def _pull(self, consumer: Consumer, instance: InstanceId, spawn: Spawn) -> None:
        while True:
            try:
                delivery = await consumer.next()
            except BusClosed:
                if self._consumer is not consumer:
                    return  # closed by us
                raise
            if self._consumer is not consumer:
                return
            try:
                task = decode(self._task_type, delivery.message.payload)
            except MalformedMessage as error:
                self._telemetry.count("malformed_messages", kind=self._queue)
                log.warning("a task was dropped: %s", error)
                await delivery.term()
                continue
            may_run = self._attempts.known(task.request, delivery, instance)
            if may_run is not None:
                await self._settle(task, delivery, may_run)
                continue
            asking = spawn(self._ask(task, delivery, instance), "ask")
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _ask(self, task: T, delivery: Delivery, instance: InstanceId) -> None:
        """`wanted` is asked beside the pulling: a gateway that does not answer must not hold up the others' tasks."""
        await self._settle(task, delivery, await self._attempts.may_run(task.request, delivery, instance))

    async def _settle(self, task: T, delivery: Delivery, may_run: bool) -> None:
        if may_run:
            self._take(task, delivery)
            return
        self._telemetry.count("unwanted_attempts", reason="not_wanted")
        self._dropped(task.request)
        await acknowledge(delivery)


async def acknowledge(delivery: Delivery) -> None:
    """Ack; a lost ack only means a redelivery, which `wanted` filters."""
    try:
        await delivery.ack()
    except BusError as error:
        log.info("an ack was lost: %s", error)


async def keep_in_progress(held: Callable[[], Iterable[Delivery]]) -> None:
    """For ever: tell JetStream that what is held is still worked on; a few at a time, as a router may hold thousands."""
    while True:
        await asyncio.sleep(IN_PROGRESS_S)
        for number, delivery in enumerate(list(held()), start=1):
            if number % IN_PROGRESS_ROUND == 0:
                await asyncio.sleep(0)
            try:
                await delivery.in_progress()
            except BusClosed:
                raise
            except BusError:  # cut off; a redelivery is filtered by what we hold
                break
