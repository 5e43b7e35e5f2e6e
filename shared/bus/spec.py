"""How a stream, a bucket or a durable is to be: plain data. `streams` holds the rules of this system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """A stream. Limits of None are unlimited."""

    name: str
    subject: str
    """What it stores; one subject with wildcards."""
    retention: Literal["workqueue", "limits"]
    """workqueue: a message is deleted when it is acked. limits: it stays until a limit drops it."""
    discard: Literal["new", "old"]
    """What gives way when the stream is full."""
    storage: Literal["memory", "file"]
    max_bytes: int
    max_messages: int | None = None
    max_age_s: float | None = None
    max_messages_per_subject: int | None = None
    """With discard `new`, a subject that has so many refuses more (a bucket keeps the last one instead)."""
    duplicate_window_s: float | None = None
    is_bucket: bool = False


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """The durable of a work queue: explicit ack, everything from the start."""

    ack_wait_s: float
    max_deliver: int
    """-1: for ever."""
    max_ack_pending: int
    inactive_threshold_s: float | None
    """The server deletes the durable when nobody has pulled for so long; None: never."""
