"""W3C trace context as a string: 00-<trace id>-<span id>-<flags>. It travels in messages and in HTTP and NATS headers."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_NO_TRACE = "0" * 32
_NO_SPAN = "0" * 16

# Ids only have to differ: a generator seeded by the system is six times cheaper than asking it for every span.
_random = random.SystemRandom().getrandbits
_cheap = random.Random(_random(128)).getrandbits


class TraceContext(NamedTuple):
    """One span, as others name it."""

    trace_id: str
    span_id: str
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse(traceparent: str) -> TraceContext | None:
    """None for "" and for whatever is no traceparent: a bad header starts a new trace and is no error."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version 00 ends here; a later version may append fields; ff is forbidden.
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1))


def new_span_id() -> str:
    """16 hex digits, not all zero."""
    return f"{_cheap(64) or 1:016x}"


def new_trace(sample: float = 1.0) -> TraceContext:
    """A trace of its own. `sample`: how likely it is to be recorded, by all who take part."""
    trace_id = _cheap(128) or 1
    return TraceContext(f"{trace_id:032x}", new_span_id(), (trace_id & 2**56 - 1) < sample * 2**56)


def child_of(parent: TraceContext) -> TraceContext:
    """A new span in the trace of `parent`."""
    return TraceContext(parent.trace_id, new_span_id(), parent.is_sampled)
