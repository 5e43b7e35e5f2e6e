"""Messages → bytes and back. The only place that encodes or decodes what travels between processes."""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import msgspec

from shared.errors import MalformedMessage

M = TypeVar("M", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode


@cache
def _decoder(message_type: type[M]) -> msgspec.msgpack.Decoder[M]:
    return msgspec.msgpack.Decoder(message_type)


def decode(message_type: type[M], payload: bytes | memoryview) -> M:
    """Decode and check `payload`. Wrong tag, type, range, depth or length raises MalformedMessage; nothing is allocated for it."""
    try:
        return _decoder(message_type).decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise MalformedMessage(message_type.__name__, str(error)[:200]) from error
