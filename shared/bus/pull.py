"""Our own pull loop (nats-py's `fetch` stalls on orphaned requests): one inbox, a window of credits, a timer that trusts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from shared.bus.base import Message
from shared.bus.jetstream import API, NS
from shared.bus.wire import NO_RESPONDERS, Stop, Wire, status_of
from shared.errors import BusClosed, BusError

log = logging.getLogger(__name__)

EXPIRES_S = 5.0
"""How long the server keeps a pull request that it cannot fill."""
OVERDUE_S = 1.0
"""After EXPIRES_S, when a request counts as lost."""
TICK_S = 0.5
RETRY_S = 0.2
MAX_RETRY_S = 2.0

T = TypeVar("T")


class PullLoop(ABC, Generic[T]):
    """Keeps `window` messages at most asked for and not yet taken. Guarantees:

    1. A request that ends by status (expired, no messages, leader or consumer gone) or without a word is asked again.
    2. After a reconnect everything is asked again; `prepare` runs first, and again whenever the server knows no consumer.
    3. `take` waits as long as it takes; it raises BusClosed after `shut` and when the connection is lost for good.
    """

    def __init__(self, wire: Wire, stream: str, window: int, inbox: str) -> None:
        self._wire = wire
        self._stream = stream
        self._window = window
        self._inbox = inbox
        self._ready: deque[T] = deque()
        self._requests: OrderedDict[str, list[float]] = OrderedDict()  # token → [messages still to come, overdue at]
        self._tokens = itertools.count()
        self._is_prepared = False
        self._is_paused = False
        self._is_closed = False
        self._waiters: list[asyncio.Future[None]] = []
        self._kick = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stop: Stop | None = None
        self._forget: list[Callable[[], None]] = []
        self._name = ""

    @abstractmethod
    async def prepare(self) -> str:
        """Make sure that the consumer exists. Returns its name. A BusError is tried again."""

    @abstractmethod
    def accept(self, message: Message) -> T | None:
        """Turn a message into what `take` returns; None drops it."""

    def tick(self) -> Awaitable[None] | None:
        """Called every TICK_S while the link is up."""
        return None

    async def open(self, *, now: bool = True) -> None:
        """Begin to pull. `now`: prepare first, so that a fault shows to the caller; else it is tried until it succeeds."""
        self._stop = await self._wire.listen(self._inbox + ".*", self._arrived)
        if now:
            try:
                self._name = await self.prepare()
            except BaseException:
                await self._stop()
                raise
            self._is_prepared = True
        self._forget = [self._wire.on_up(self.lost), self._wire.on_down(self._requests.clear), self._wire.on_closed(self._end)]
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"pull {self._stream}")

    async def take(self) -> T:
        """The next message, in order of arrival."""
        while not self._ready:
            if self._is_closed:
                raise BusClosed("the consumer is closed")
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and self._ready:
                    self._wake()  # it was woken for a message that somebody else may have now
                raise
            finally:
                self._waiters.remove(waiter)
        taken = self._ready.popleft()
        if self._num_wanted():
            self._kick.set()
        return taken

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._kick.set()

    def lost(self) -> None:
        """The consumer may be gone, or its sequence broken: prepare and ask again."""
        self._is_prepared = False
        self._requests.clear()
        self._kick.set()

    async def shut(self) -> None:
        """Stop pulling. Idempotent."""
        if self._stop is None:
            return
        self._end()
        for forget in self._forget:
            forget()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        stop, self._stop = self._stop, None
        with contextlib.suppress(BusError):
            await stop()

    async def _run(self) -> None:
        retry_s = RETRY_S
        while not self._is_closed:
            try:
                await self._keep()
                retry_s = RETRY_S
            except BusClosed:
                self._end()
                return
            except BusError as error:
                log.warning("pulling from %s: %s; again in %g s", self._stream, error.message, retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _keep(self) -> None:
        """One round: prepare if need be, give up overdue requests, ask for what is missing, then wait for news or the clock."""
        self._kick.clear()
        if self._wire.is_connected:
            if not self._is_prepared:
                self._name = await self.prepare()
                self._is_prepared = True
            self._drop_overdue()
            await self._ask()
            ticked = self.tick()
            if ticked is not None:
                await ticked
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._kick.wait()

    def _drop_overdue(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for token, (_, overdue_s) in list(self._requests.items()):
            if now_s >= overdue_s:
                del self._requests[token]
                self._wire.counts["pull_lost"] += 1

    def _num_wanted(self) -> int:
        """How many to ask for now; 0 until half the window is free."""
        num_asked = sum(int(left) for left, _ in self._requests.values())
        num_wanted = self._window - num_asked - len(self._ready)
        if self._is_paused or num_wanted < (1 if num_asked == 0 else max(1, self._window // 2)):
            return 0
        return num_wanted

    async def _ask(self) -> None:
        num_wanted = self._num_wanted()
        if not num_wanted:
            return
        token = f"{next(self._tokens):x}"
        self._requests[token] = [num_wanted, asyncio.get_running_loop().time() + EXPIRES_S + OVERDUE_S]
        body = msgspec.json.encode({"batch": num_wanted, "expires": int(EXPIRES_S * NS)})
        if not await self._wire.send(f"{API}.CONSUMER.MSG.NEXT.{self._stream}.{self._name}", body, f"{self._inbox}.{token}"):
            self._requests.pop(token, None)

    def _arrived(self, message: Message) -> None:
        status = status_of(message)
        if status and message.subject.startswith(self._inbox):
            self._ended(message.subject[len(self._inbox) + 1 :], status, message.headers.get("description", ""))
            return
        self._spend()
        accepted = self.accept(message)
        if accepted is not None:
            self._ready.append(accepted)
            self._wake()
        elif self._num_wanted():
            self._kick.set()

    def _ended(self, token: str, status: str, description: str) -> None:
        """The server ended one request: 404 no messages, 408 expired, 409 for many reasons, 503 no such consumer."""
        if self._requests.pop(token, None) is None:
            return
        if status == NO_RESPONDERS or "deleted" in description.lower():
            self._is_prepared = False
        elif status not in ("404", "408", "409"):
            log.warning("pull request on %s ended: %s %s", self._stream, status, description)
        if status == "408" or not self._is_prepared:
            self._kick.set()

    def _spend(self) -> None:
        """A message came: the oldest request has one less to come."""
        for token, request in self._requests.items():
            request[0] -= 1
            if request[0] <= 0:
                del self._requests[token]
            return

    def _end(self) -> None:
        """`take` gives what is here, then BusClosed."""
        self._is_closed = True
        self._kick.set()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
                if not self._is_closed:
                    return
