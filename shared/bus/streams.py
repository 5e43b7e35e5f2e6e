"""The rules of every stream, durable and bucket. A name alone tells its rules, so anybody can make again what was wiped.

The work queues lie in memory: the gateway holds the truth about every request and submits again what is lost, so that a disk would
add a way to fail (full, slow, corrupt) and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from shared.bus.base import Bus
from shared.bus.spec import ConsumerSpec, StreamSpec
from shared.errors import StreamMissing
from shared.messages.subjects import Subjects

Kind = Literal["requests", "prefill", "decode", "usage", "dead"]
WorkQueue = Literal["requests", "prefill", "decode"]

QUEUE_TTL_S = 120.0
"""How long a request may wait to be routed."""
LONGEST_DEADLINE_S = 3600.0
"""No request lives longer; tasks are kept for its holders a little longer still."""
TASK_TTL_S = LONGEST_DEADLINE_S + 60.0
ACK_WAIT_S = 5.0
IN_PROGRESS_S = 1.5
"""How often a holder says that it still works on a message."""
MAX_DELIVER = 3
"""Deliveries of a task before it is a dead letter."""
WORKER_DURABLE_S = 60.0
LEASE_TTL_S = 3.0
MAX_TASKS_PER_WORKER = 1024
"""Tasks queued for one worker; routers book at most twice its slots, so this only stops what runs wild."""

MIB = 2**20
DAY_S = 86_400.0

_WORK = StreamSpec(name="", subject="", retention="workqueue", discard="new", storage="memory", max_bytes=64 * MIB, max_messages=65_536)
_TASKS = replace(_WORK, max_age_s=TASK_TTL_S, duplicate_window_s=TASK_TTL_S, max_messages_per_subject=MAX_TASKS_PER_WORKER)
_RECORDS = StreamSpec(name="", subject="", retention="limits", discard="old", storage="file", max_bytes=256 * MIB)
_BUCKET = StreamSpec(
    name="",
    subject="",
    retention="limits",
    discard="new",
    storage="memory",
    max_bytes=16 * MIB,
    max_messages_per_subject=1,
    is_bucket=True,
)

_STREAMS: dict[Kind, StreamSpec] = {
    "requests": replace(_WORK, max_age_s=QUEUE_TTL_S, duplicate_window_s=QUEUE_TTL_S),
    "prefill": _TASKS,
    "decode": _TASKS,
    "usage": replace(_RECORDS, max_age_s=30 * DAY_S, duplicate_window_s=600.0),
    "dead": replace(_RECORDS, max_bytes=64 * MIB, max_age_s=7 * DAY_S, duplicate_window_s=600.0),
}
_SUBJECT_OF: dict[Kind, Callable[[Subjects], str]] = {
    "requests": lambda subjects: subjects.request("*", "*"),
    "prefill": lambda subjects: subjects.prefill("*"),
    "decode": lambda subjects: subjects.decode("*"),
    "usage": lambda subjects: subjects.usage_event("*"),
    "dead": lambda subjects: subjects.dead("*"),
}
_BUCKETS: dict[Literal["workers", "config"], StreamSpec] = {
    "workers": replace(_BUCKET, max_age_s=LEASE_TTL_S),
    "config": replace(_BUCKET, storage="file"),
}

_ROUTER_DURABLE = ConsumerSpec(ack_wait_s=ACK_WAIT_S, max_deliver=-1, max_ack_pending=65_536, inactive_threshold_s=None)
_WORKER_DURABLE = ConsumerSpec(
    ack_wait_s=ACK_WAIT_S, max_deliver=MAX_DELIVER, max_ack_pending=MAX_TASKS_PER_WORKER, inactive_threshold_s=WORKER_DURABLE_S
)
_DURABLES: dict[WorkQueue, ConsumerSpec] = {"requests": _ROUTER_DURABLE, "prefill": _WORKER_DURABLE, "decode": _WORKER_DURABLE}

BUCKET_PREFIX = "KV_"
"""A bucket is a stream of this name; NATS clients of every language agree on it."""


def stream_specs(subjects: Subjects) -> list[StreamSpec]:
    """Every stream and bucket of one deployment."""
    streams = [replace(rule, name=subjects.stream(kind), subject=_SUBJECT_OF[kind](subjects)) for kind, rule in _STREAMS.items()]
    return streams + [_named_bucket(subjects.bucket(name), rule) for name, rule in _BUCKETS.items()]


async def provision(bus: Bus, subjects: Subjects) -> None:
    """Make every stream and bucket, or bring them to the rules. Idempotent, and safe to be done by several processes at once."""
    for spec in stream_specs(subjects):
        await bus.add_stream(spec)


def spec_of_stream(name: str) -> StreamSpec:
    """The rules of a stream or bucket by its name in NATS. StreamMissing: not one of ours."""
    namespace = name.removeprefix(BUCKET_PREFIX).partition("_")[0].lower()
    if namespace:
        for spec in stream_specs(Subjects(namespace)):
            if spec.name == name:
                return spec
    raise StreamMissing(name)


def spec_of_bucket(name: str) -> StreamSpec:
    """The rules of a bucket by its name without the prefix."""
    return spec_of_stream(BUCKET_PREFIX + name)


def spec_behind(subject: str) -> StreamSpec:
    """The rules of the stream that stores `subject`. StreamMissing: none of ours does."""
    for spec in stream_specs(Subjects(subject.partition(".")[0])):
        if subject_matches(spec.subject, subject):
            return spec
    raise StreamMissing(subject)


def consumer_spec(stream: str, max_deliver: int | None = None) -> ConsumerSpec:
    """The rules of a durable of work queue `stream`; `max_deliver` replaces the rule's own."""
    kind = stream.partition("_")[2].lower()
    for work_queue, rule in _DURABLES.items():
        if kind == work_queue:
            return rule if max_deliver is None else replace(rule, max_deliver=max_deliver)
    raise StreamMissing(stream)


def dead_subject(stream: str) -> str:
    """Where the dead letters of work queue `stream` go."""
    namespace, _, kind = stream.lower().partition("_")
    return Subjects(namespace).dead(kind)


def subject_matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, `>` at the end one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(given) > position
        if position >= len(given) or token not in ("*", given[position]):
            return False
    return len(wanted) == len(given)


def _named_bucket(name: str, rule: StreamSpec) -> StreamSpec:
    return replace(rule, name=BUCKET_PREFIX + name, subject=f"$KV.{name}.>")
