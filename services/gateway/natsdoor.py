"""The NATS front door: the same bodies as over HTTP, replies on the caller's inbox.

`stream: true`: a message a chunk, an empty message ends. Otherwise one reply, also if it is an error. An error stands in
`Nats-Service-Error` and `Nats-Service-Error-Code`, with the API's error object as payload. The API key travels in an
`Authorization` header.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from services.gateway.admission import Client
from services.gateway.auth import Keys
from services.gateway.desk import Desk
from services.gateway.http import HttpDoor, without_effect
from services.gateway.openai import ChatBody, CompletionBody, GenerationBody, parse_body
from services.gateway.reply import error_body, make_reply
from shared.bus.base import Bus, Message, Subscription
from shared.bus.discovery import Endpoint
from shared.errors import BadRequest, BusClosed, BusError, SlipstreamError
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry

QUEUE = "gateway"
INBOX = "_INBOX"
CONCURRENCY = 1024

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


def endpoints(subjects: Subjects) -> list[Endpoint]:
    """What NATS discovery shows of a gateway."""
    return [Endpoint(name, subjects.front_door(name), QUEUE) for name in ("generate", "models")]


class _Endpoint(msgspec.Struct):
    """What `$SRV.STATS` tells of one, from its start on."""

    num_requests: int = 0
    num_errors: int = 0
    processing_time: int = 0
    """Nanoseconds from a call to its last message, of all calls that have ended."""
    last_error: str = ""


class NatsDoor:
    """Gateways share the subjects through a queue group. A task a call."""

    def __init__(self, bus: Bus, subjects: Subjects, desk: Desk, http: HttpDoor, keys: Keys, telemetry: Telemetry, spawn: Spawn) -> None:
        self._bus = bus
        self._subjects = subjects
        self._desk = desk
        self._http = http
        self._keys = keys
        self._telemetry = telemetry
        self._spawn = spawn
        self._subscriptions: list[Subscription] = []
        self._free = asyncio.Semaphore(CONCURRENCY)
        self._calls: set[asyncio.Task[None]] = set()
        self._generate_stats, self._models_stats = _Endpoint(), _Endpoint()

    def stats(self) -> dict[str, dict[str, Any]]:
        """For `$SRV.STATS`."""
        return {name: msgspec.structs.asdict(told) for name, told in (("generate", self._generate_stats), ("models", self._models_stats))}

    async def start(self) -> None:
        generate = await self._bus.subscribe(self._subjects.front_door("generate"), queue=QUEUE)
        self._subscriptions.append(generate)
        self._subscriptions.append(await self._bus.serve(self._subjects.front_door("models"), self._models, queue=QUEUE))
        self._spawn(self._follow(generate), "nats-door")

    async def close(self) -> None:
        """Take no more calls; those in work go on."""
        for subscription in self._subscriptions:
            await subscription.close()

    async def _follow(self, calls: Subscription) -> None:
        async for message in calls:
            if not message.reply.startswith(INBOX):
                self._telemetry.count("nats_refused", reason="no_inbox")
                continue
            self._generate_stats.num_requests += 1
            await self._free.acquire()
            task = asyncio.create_task(self._call(message))
            self._calls.add(task)
            task.add_done_callback(partial(self._over, time.perf_counter_ns()))

    def _over(self, began_ns: int, task: asyncio.Task[None]) -> None:
        self._generate_stats.processing_time += time.perf_counter_ns() - began_ns
        self._calls.discard(task)
        self._free.release()

    async def _call(self, message: Message) -> None:
        headers = message.headers
        try:
            tenant = self._keys.tenant(headers.get("authorization", ""))
            body, ignored = parse_call(message.payload)
        except SlipstreamError as error:
            await self._refuse(message.reply, error, is_stream=wants_stream(message.payload))
            return
        try:
            await self._generate(message.reply, body, ignored, tenant, headers.get("traceparent", ""))
        except BusClosed as error:
            log.info("a call ended with the connection: %s", error)
        except SlipstreamError as error:
            await self._refuse(message.reply, error, is_stream=bool(body.stream))
        except Exception:
            log.exception("a call failed inside the gateway")
            await self._refuse(message.reply, SlipstreamError("internal error"), is_stream=bool(body.stream))

    async def _generate(self, inbox: str, body: GenerationBody, ignored: list[str], tenant: str, caller: str) -> None:
        client = Client(tenant, self._telemetry.mint_traceparent(caller), caller)
        admitted = await self._desk.admit(body, client)
        async with self._desk.generation(admitted, body, client, "nats") as generation:
            reply = make_reply(generation, body)
            async for pieces in generation.pieces():
                for piece in pieces:
                    if body.stream:
                        for chunk in reply.chunks(piece):
                            await self._bus.publish(inbox, chunk)
                    else:
                        reply.add(piece)
        headers = without_effect(ignored)
        if not body.stream:
            await self._bus.publish(inbox, msgspec.json.encode(reply.whole()), headers=headers)
            return
        for chunk in reply.last_chunks():
            await self._bus.publish(inbox, chunk)
        await self._bus.publish(inbox, b"", headers={"ss-final": "1", **headers})

    async def _refuse(self, inbox: str, error: SlipstreamError, *, is_stream: bool) -> None:
        self._telemetry.count("nats_refused", reason=error.code)
        self._generate_stats.num_errors += 1
        self._generate_stats.last_error = f"{error.status}:{error.code}"
        headers = {"Nats-Service-Error": error.message.replace("\r", " ").replace("\n", " "), "Nats-Service-Error-Code": str(error.status)}
        try:
            await self._bus.publish(inbox, msgspec.json.encode(error_body(error)), headers=headers)
            if is_stream:
                await self._bus.publish(inbox, b"", headers={"ss-final": "1"})
        except BusError as lost:
            log.info("an error could not be told to its caller: %s", lost)

    async def _models(self, message: Message) -> bytes:
        began_ns = time.perf_counter_ns()
        self._models_stats.num_requests += 1
        try:
            self._keys.tenant(message.headers.get("authorization", ""))
        except SlipstreamError as error:
            self._telemetry.count("nats_refused", reason=error.code)
            self._models_stats.num_errors += 1
            self._models_stats.last_error = f"{error.status}:{error.code}"
            raise
        answer = msgspec.json.encode({"object": "list", "data": self._http.model_list()})
        self._models_stats.processing_time += time.perf_counter_ns() - began_ns
        return answer


class _Peek(msgspec.Struct):
    stream: bool | None = None


def wants_stream(payload: bytes) -> bool:
    """Of a call that is refused: whether its caller waits for an empty message."""
    decode = msgspec.json.decode if payload.lstrip()[:1] == b"{" else msgspec.msgpack.decode
    try:
        return bool(decode(payload, type=_Peek).stream)
    except (msgspec.MsgspecError, RecursionError):
        return False


def parse_call(payload: bytes) -> tuple[GenerationBody, list[str]]:
    """JSON or msgpack; chat if it has `messages`, else a completion. With the fields that have no effect."""
    is_msgpack = payload.lstrip()[:1] != b"{"
    try:
        fields = msgspec.msgpack.decode(payload) if is_msgpack else msgspec.json.decode(payload, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest("the payload is neither a JSON object nor a msgpack map") from error
    if not isinstance(fields, dict):
        raise BadRequest("the payload is neither a JSON object nor a msgpack map")
    body_type: type[ChatBody] | type[CompletionBody] = ChatBody if "messages" in fields else CompletionBody
    return parse_body(body_type, payload, is_msgpack=is_msgpack)
