"""Messages → bytes and back. The only place that encodes or decodes what travels between processes."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from shared.errors import MalformedMessage

M = TypeVar("M", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


@cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(message_type)


def decode(message_type: type[M], payload: bytes | memoryview) -> M:
    """Decode and check `payload`. Wrong tag, type, range, depth or length raises MalformedMessage; nothing is allocated for it."""
    return cast(M, decode_union(message_type, payload))


def decode_union(union: Any, payload: bytes | memoryview) -> Any:
    """As `decode`, for a closed union of tagged structs: `match` on what comes back."""
    try:
        return _decoder(union).decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise MalformedMessage(getattr(union, "__name__", str(union)), str(error)[:200]) from error
