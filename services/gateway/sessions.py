"""All sessions of one gateway, and their way to the bus: events are handed to the session concerned, its actions are carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from services.gateway.news import News, Rounds
from services.gateway.session import Action, AskResend, Count, Session, Submit, Tell
from shared.bus.base import Bus, Message
from shared.errors import BusClosed, BusError, MalformedMessage, NoCapacity, Overloaded, PayloadTooLarge, QueueFull, RequestError
from shared.fleet import Fleet
from shared.messages.codec import decode, decode_union, encode
from shared.messages.fleet import WorkerLease
from shared.messages.request import GenerateRequest
from shared.messages.session import (
    Finish,
    FinishReply,
    Progress,
    Resend,
    ResendReply,
    Routed,
    TokenBatch,
    TokenMessage,
    Wanted,
    WantedReply,
)
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.telemetry.logs import ids_of
from shared.types import InstanceId

TICK_S = 0.1
RESEND_S = 0.5
RETRY_AFTER_S = 1.0
MAX_TAKEN = 32
"""Tokens of one choice that are rendered at a time: behind a client that reads slowly thousands gather, and others wait meanwhile.
As many fewer as they have logprobs, which are as much work each."""

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


class Stream:
    """A session as its client's side sees it: wait for news, read the output from where it was left."""

    def __init__(self, session: Session, news: News | None = None) -> None:
        self.session = session
        self.news = news or News()
        self.num_read = 0
        self._max_taken = max(MAX_TAKEN // (session.first.sampling.num_logprobs + 2), 1)

    def take(self) -> list[int]:
        """The next output tokens, as many as are rendered at a time."""
        fresh = self.session.output[self.num_read : self.num_read + self._max_taken]
        self.num_read += len(fresh)
        return fresh

    @property
    def is_behind(self) -> bool:
        """More is there than was taken."""
        return self.num_read < len(self.session.output)

    async def next(self) -> list[int]:
        """Waits for output tokens. Empty: the session has ended."""
        while not (fresh := self.take()) and self.session.end is None:
            await self.news.wait()
        return fresh


class Sessions:
    """`open` begins a request; everything after that is driven by messages, leases and the clock."""

    def __init__(self, bus: Bus, subjects: Subjects, fleet: Fleet, telemetry: Telemetry, gateway: InstanceId, spawn: Spawn) -> None:
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet
        self._telemetry = telemetry
        self._gateway = gateway
        self._spawn = spawn
        self._streams: dict[str, Stream] = {}
        self._rounds = Rounds()
        self._empty = asyncio.Event()

    def __len__(self) -> int:
        return len(self._streams)

    async def start(self) -> None:
        """Listen, before the first request is let in."""
        tokens = await self._bus.subscribe(self._subjects.tokens(self._gateway), max_messages=2**18, max_bytes=2**28)

        async def follow() -> None:
            async for message in tokens:
                self._on_tokens(message)

        self._spawn(follow(), "tokens")
        await self._bus.serve(self._subjects.session(self._gateway, "wanted"), self._on_wanted, concurrency=1024)
        await self._bus.serve(self._subjects.session(self._gateway, "finish"), self._on_finish, concurrency=1024)
        self._fleet.on_change(self._on_lease)
        self._spawn(self._tick(), "sessions")

    def name_of(self, instance: InstanceId | None) -> str | None:
        """What people call a process; its id if it is gone."""
        lease = self._fleet.get(instance) if instance else None
        return lease.name if lease else instance

    # -- the client's side ---------------------------------------------------------------------------------------------------
    async def open(self, request: GenerateRequest, news: News | None = None) -> Stream:
        """Submit a request. Raises Overloaded or NoCapacity if it cannot be queued."""
        stream = Stream(Session(request, self._bus.clock.now()), news)
        self._streams[request.request_id] = stream
        try:
            await self._submit(request)
        except BusClosed:
            raise
        except BusError as error:
            del self._streams[request.request_id]
            raise _refusal(error) from error
        except asyncio.CancelledError:
            self.close(stream)
            raise
        return stream

    def close(self, stream: Stream) -> None:
        """The client's side is done with it, or gone: what still runs is cancelled."""
        session = stream.session
        if session.end is None:
            self._carry_out(stream, session.cancel())
        self._streams.pop(session.first.request_id, None)
        if not self._streams:
            self._empty.set()

    async def drained(self) -> None:
        """Returns when no request is open."""
        while self._streams:
            self._empty.clear()
            await self._empty.wait()

    def stop(self, stream: Stream) -> None:
        """A stop string was found."""
        self._carry_out(stream, stream.session.stop())

    # -- the workers' side -----------------------------------------------------------------------------------------------------
    def _on_tokens(self, message: Message) -> None:
        try:
            batch = decode_union(TokenMessage, message.payload)
        except MalformedMessage as error:
            self._telemetry.count("malformed_messages", kind="tokens")
            log.warning("a message of tokens was dropped: %s", error)
            return
        now_s = self._bus.clock.now()
        match batch:
            case TokenBatch():
                for delta in batch.deltas:
                    stream = self._streams.get(delta.request_id)
                    if stream is not None:
                        self._carry_out(stream, stream.session.on_tokens(batch.worker, delta, now_s))
            case Routed():
                stream = self._streams.get(batch.request_id)
                if stream is not None and stream.session.wants(batch.epoch):
                    stream.session.explanation = batch.explanation
            case Progress():
                for held in batch.held:
                    stream = self._streams.get(held.request_id)
                    if stream is not None:
                        self._carry_out(stream, stream.session.on_progress(batch.instance, batch.role, held, now_s))

    async def _on_wanted(self, message: Message) -> bytes:
        asked = decode(Wanted, message.payload)
        stream = self._streams.get(asked.request_id)
        return encode(WantedReply(stream is not None and stream.session.wants(asked.epoch)))

    async def _on_finish(self, message: Message) -> bytes:
        finish = decode(Finish, message.payload)
        stream = self._streams.get(finish.request_id)
        if stream is None:
            return encode(FinishReply(True))
        reply, actions = stream.session.on_finish(finish, self._bus.clock.now())
        self._carry_out(stream, actions)
        return encode(reply)

    def _on_lease(self, lease: WorkerLease, is_alive: bool) -> None:
        if is_alive or lease.role not in ("prefill", "decode", "router"):
            return
        now_s, has_router = self._bus.clock.now(), self._has_router()
        for stream in list(self._streams.values()):
            self._carry_out(stream, stream.session.on_lost(lease.instance, now_s, has_router=has_router))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s, has_router = self._bus.clock.now(), self._has_router()
            for stream in list(self._streams.values()):
                self._carry_out(stream, stream.session.tick(now_s, has_router=has_router))

    def _has_router(self) -> bool:
        return bool(self._fleet.workers("router"))

    # -- actions ---------------------------------------------------------------------------------------------------------------
    def _carry_out(self, stream: Stream, actions: list[Action]) -> None:
        self._rounds.add(stream.news)
        if not actions:
            return
        in_order: list[Action] = []
        for action in actions:
            match action:
                case Count():
                    self._telemetry.count("session_events", event=action.what)
                case AskResend():
                    self._spawn(self._ask_resend(stream, action), "resend")
                case Submit() | Tell():
                    in_order.append(action)
        if in_order:
            self._spawn(self._send(stream, in_order), "send")

    async def _send(self, stream: Stream, actions: list[Action]) -> None:
        """A cancel before the attempt that replaces it."""
        for action in actions:
            try:
                if isinstance(action, Tell):
                    await self._bus.publish(self._subjects.cancel(), encode(action.cancel))
                elif isinstance(action, Submit):
                    await self._submit(action.request)
            except BusClosed:
                raise
            except BusError as error:  # the clock finds the request without a holder and submits it again
                first = stream.session.first
                log.warning("%s failed: %s", type(action).__name__, error, extra=ids_of(first.request_id, first.traceparent))

    async def _submit(self, request: GenerateRequest) -> None:
        subject = self._subjects.request(request.request_class, request.model)
        await self._bus.enqueue(subject, encode(request), msg_id=request.msg_id)

    async def _ask_resend(self, stream: Stream, action: AskResend) -> None:
        session = stream.session
        asked = Resend(session.first.request_id, session.epoch, action.index)
        try:
            reply = await self._bus.request(self._subjects.worker(action.instance, "resend"), encode(asked), timeout_s=RESEND_S)
            delta = decode(ResendReply, reply.payload).delta
        except BusClosed:
            raise
        except BusError as error:  # asked again at the next sign of a gap; without any sign the worker counts as lost
            log.info("no answer to a resend: %s", error, extra=ids_of(session.first.request_id, session.first.traceparent))
            return
        if delta is not None:
            self._carry_out(stream, session.on_tokens(action.instance, delta, self._bus.clock.now()))


def _refusal(error: BusError) -> RequestError:
    """What a client is told when its request could not be queued."""
    if isinstance(error, QueueFull):
        return Overloaded("the queue is full", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, PayloadTooLarge):
        refusal = RequestError(f"the request is too large for one message: {error.message}", param="messages")
        refusal.code = "context_length_exceeded"  # type: ignore[misc]
        return refusal
    return NoCapacity("the request could not be queued; try again", retry_after_s=RETRY_AFTER_S)
