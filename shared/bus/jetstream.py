"""The JetStream API, as far as this system uses it: JSON over request-reply, typed, errors by one table."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from shared.bus.base import Headers, Message
from shared.bus.requests import Requests
from shared.bus.spec import ConsumerSpec, StreamSpec
from shared.errors import BusError, LinkDown, MalformedMessage, QueueFull, RevisionConflict, StreamMissing

API = "$JS.API"
API_TIMEOUT_S = 5.0
RETRY_S = 0.05
NS = 1_000_000_000

STREAM_NAME_IN_USE = 10058
NO_MESSAGE_FOUND = 10037


class ApiError(msgspec.Struct, frozen=True):
    """JetStream's refusal."""

    code: int
    err_code: int = 0
    description: str = ""


class _Reply(msgspec.Struct, frozen=True):
    error: ApiError | None = None


class PubAck(_Reply, frozen=True):
    """Stored, at `seq`; `duplicate`: under the same Nats-Msg-Id earlier."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class ConsumerInfo(_Reply, frozen=True):
    """`ts` is the server's clock (RFC 3339)."""

    name: str = ""
    num_pending: int = 0
    ts: str = ""


class _StreamState(msgspec.Struct, frozen=True):
    messages: int = 0


class _StreamInfo(_Reply, frozen=True):
    state: _StreamState = _StreamState()


class _StreamNames(_Reply, frozen=True):
    streams: list[str] | None = None


class _StoredMessage(msgspec.Struct, frozen=True):
    subject: str
    seq: int
    data: str = ""


class _MessageReply(_Reply, frozen=True):
    message: _StoredMessage | None = None


ERRORS: dict[int, Callable[[str], BusError]] = {
    10014: StreamMissing,  # consumer not found
    10059: StreamMissing,  # stream not found
    10071: RevisionConflict,  # wrong last sequence
    10164: RevisionConflict,
    10023: QueueFull,  # insufficient resources: the disk or the account's limit
    10028: QueueFull,  # memory
    10047: QueueFull,  # storage
    10077: QueueFull,  # maximum messages, bytes, or messages of the subject
    10122: QueueFull,  # too many requests in work
}
"""JetStream's err_code → ours, made with the subject, key or stream concerned. What is not listed becomes a plain BusError."""

R = TypeVar("R", bound=_Reply)


def error_of(error: ApiError, what: str) -> BusError:
    """JetStream's refusal of `what` as one of ours."""
    make = ERRORS.get(error.err_code)
    return make(what) if make else BusError(f"JetStream refuses {what}: {error.description} ({error.err_code})")


class JetStream:
    """One connection's JetStream calls. A missing server side (no JetStream, no leader) raises NoResponders."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def publish(self, subject: str, payload: bytes, *, headers: Headers | None, timeout_s: float) -> PubAck:
        """One attempt to store a message. Raises QueueFull, RevisionConflict, BusTimeout; NoResponders if no stream stores `subject`."""
        reply = await self._requests.one(subject, payload, timeout_s=timeout_s, headers=headers)
        return _checked(reply, PubAck, subject)

    async def check(self) -> None:
        """Raises NoResponders or BusError if this account has no JetStream."""
        await self._call("INFO", _Reply, "this account")

    async def create_stream(self, spec: StreamSpec) -> bool:
        """False: it exists with another configuration."""
        try:
            await self._call(f"STREAM.CREATE.{spec.name}", _Reply, spec.name, _stream_config(spec))
        except _InUse:
            return False
        return True

    async def update_stream(self, spec: StreamSpec) -> None:
        """Change the limits of a stream. Raises StreamMissing."""
        await self._call(f"STREAM.UPDATE.{spec.name}", _Reply, spec.name, _stream_config(spec))

    async def delete_stream(self, name: str) -> None:
        """Raises StreamMissing."""
        await self._call(f"STREAM.DELETE.{name}", _Reply, name)

    async def num_messages(self, stream: str) -> int:
        """How many messages are stored. Raises StreamMissing."""
        return (await self._call(f"STREAM.INFO.{stream}", _StreamInfo, stream)).state.messages

    async def stream_names(self) -> list[str]:
        """Up to 1,024 names."""
        return (await self._call("STREAM.NAMES", _StreamNames, "the streams")).streams or []

    async def purge(self, stream: str, subject: str) -> None:
        """Delete every message of `subject`. Raises StreamMissing."""
        await self._call(f"STREAM.PURGE.{stream}", _Reply, stream, {"filter": subject})

    async def put_durable(self, stream: str, durable: str, subject: str, spec: ConsumerSpec) -> ConsumerInfo:
        """Create the durable, or find it. Raises StreamMissing."""
        config: dict[str, Any] = {
            "name": durable,
            "durable_name": durable,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": int(spec.ack_wait_s * NS),
            "max_deliver": spec.max_deliver,
            "max_ack_pending": spec.max_ack_pending,
            "filter_subject": subject,
            "replay_policy": "instant",
        }
        if spec.inactive_threshold_s is not None:
            config["inactive_threshold"] = int(spec.inactive_threshold_s * NS)
        return await self._create_consumer(stream, durable, subject, config)

    async def put_watch(self, stream: str, name: str, subject: str, inactive_threshold_s: float) -> ConsumerInfo:
        """An ephemeral consumer that gives the last message of each subject, then every further one, without acks."""
        config: dict[str, Any] = {
            "name": name,
            "deliver_policy": "last_per_subject",
            "ack_policy": "none",
            "filter_subject": subject,
            "replay_policy": "instant",
            "mem_storage": True,
            "inactive_threshold": int(inactive_threshold_s * NS),
        }
        return await self._create_consumer(stream, name, subject, config)

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Raises StreamMissing if there is none."""
        await self._call(f"CONSUMER.DELETE.{stream}.{name}", _Reply, name)

    async def last_message(self, stream: str, subject: str) -> Message | None:
        """The last message of `subject`, from any replica; its headers tell `nats-sequence`. Raises NoResponders if `stream` is gone."""
        reply = await self._ask(f"DIRECT.GET.{stream}.{subject}", b"")
        status = reply.headers.get("status", "")
        if status == "404":
            return None
        if status:
            raise BusError(f"JetStream cannot read {subject}: status {status}")
        return reply

    async def message_at(self, stream: str, sequence: int) -> tuple[str, bytes] | None:
        """Subject and payload of one stored message; None if it is gone."""
        reply = await self._ask(f"STREAM.MSG.GET.{stream}", msgspec.json.encode({"seq": sequence}))
        found = _decoded(reply, _MessageReply)
        if found.error is not None and found.error.err_code == NO_MESSAGE_FOUND:
            return None
        if found.error is not None or found.message is None:
            raise error_of(found.error or ApiError(500), stream)
        return found.message.subject, base64.b64decode(found.message.data)

    async def delete_message(self, stream: str, sequence: int) -> None:
        """Delete one stored message."""
        await self._call(f"STREAM.MSG.DELETE.{stream}", _Reply, stream, {"seq": sequence, "no_erase": True})

    async def _create_consumer(self, stream: str, name: str, subject: str, config: dict[str, Any]) -> ConsumerInfo:
        body = {"stream_name": stream, "config": config}
        return await self._call(f"CONSUMER.CREATE.{stream}.{name}.{subject}", ConsumerInfo, stream, body)

    async def _call(self, action: str, reply_type: type[R], what: str, body: object = None) -> R:
        payload = b"" if body is None else msgspec.json.encode(body)
        return _checked(await self._ask(action, payload), reply_type, what)

    async def _ask(self, action: str, payload: bytes) -> Message:
        """Every action here may happen twice, so it is asked again when the link broke under it."""
        deadline = time.monotonic() + API_TIMEOUT_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                return await self._requests.one(f"{API}.{action}", payload, timeout_s=left_s)
            except LinkDown:
                if time.monotonic() + RETRY_S >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)


class _InUse(BusError):
    """A stream of this name exists with another configuration."""


def _checked(reply: Message, reply_type: type[R], what: str) -> R:
    decoded = _decoded(reply, reply_type)
    if decoded.error is None:
        return decoded
    if decoded.error.err_code == STREAM_NAME_IN_USE:
        raise _InUse(what)
    raise error_of(decoded.error, what)


def _decoded(reply: Message, reply_type: type[R]) -> R:
    try:
        return msgspec.json.decode(reply.payload, type=reply_type)
    except msgspec.MsgspecError as error:
        raise MalformedMessage(reply_type.__name__, str(error)) from error


def _stream_config(spec: StreamSpec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "name": spec.name,
        "subjects": [spec.subject],
        "retention": spec.retention,
        "discard": spec.discard,
        "storage": spec.storage,
        "num_replicas": 1,
        "max_consumers": -1,
        "max_msgs": -1 if spec.max_messages is None else spec.max_messages,
        "max_bytes": spec.max_bytes,
        "max_age": int((spec.max_age_s or 0) * NS),
        "max_msg_size": -1,
        "max_msgs_per_subject": -1 if spec.max_messages_per_subject is None else spec.max_messages_per_subject,
        "allow_direct": True,
    }
    if spec.duplicate_window_s is not None:
        config["duplicate_window"] = int(spec.duplicate_window_s * NS)
    if spec.is_bucket:
        config |= {"allow_rollup_hdrs": True, "deny_delete": True}
    elif spec.discard == "new" and spec.max_messages_per_subject is not None:
        config["discard_new_per_subject"] = True
    return config
