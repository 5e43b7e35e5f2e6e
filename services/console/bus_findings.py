"""What `doctor` makes of NATS, the routers' indexes and the clocks. Pure: looks in, findings out."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from services.console.bus_look import BusLook, Index, Stream, StreamConfig
from services.console.findings import Finding
from services.console.terminal import age_text, size_text
from shared.bus.spec import StreamSpec
from shared.bus.streams import BUCKET_PREFIX, stream_specs
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from shared.telemetry.clock import SKEW_S

NEAR = 0.8
"""Of a limit: worth a warning."""
FULL = 0.95
OTHER_VERSION = (
    "What streams hold is made again: stop the stack and delete the stream,\n  nats stream rm NAME\nor NATS' data whole:\n"
    "  docker compose down && docker volume rm slipstream_nats-data"
)


def bus_findings(look: BusLook, leases: Sequence[WorkerLease], subjects: Subjects) -> list[Finding]:
    """Only what is not as it should be, except for one line that the streams are sound."""
    return [*_streams(look.streams, look.offline, leases, subjects), *_indexes(look.indexes, leases), *clock_findings(look.clocks_s)]


# -- streams ---------------------------------------------------------------------------------------------------------------
def _streams(
    streams: Mapping[str, Stream] | None, offline: Mapping[str, str], leases: Sequence[WorkerLease], subjects: Subjects
) -> Iterator[Finding]:
    if streams is None:
        yield Finding("warning", "NATS does not tell about its streams", "May the console's user ask? slipstream nats config")
        return
    specs = stream_specs(subjects)
    found = [finding for spec in specs for finding in _stream(spec, streams.get(spec.name), offline.get(spec.name, ""))]
    found += _queues([streams[name] for name in (subjects.stream("prefill"), subjects.stream("decode")) if name in streams], leases)
    yield from found or [Finding("done", f"NATS has the {len(specs)} streams and buckets, none near its limit")]
    dead = streams.get(subjects.stream("dead"))
    if dead and dead.state.messages:
        age = age_text((dead.ts - dead.state.last_ts).total_seconds())
        yield Finding(
            "warning",
            f"{dead.state.messages} dead letters (given up after three deliveries), the last {age} ago",
            "slipstream logs decode --level warning",
        )


def other_rules(spec: StreamSpec, config: StreamConfig) -> Iterator[Finding]:
    """A stream of another version: what NATS lets nobody change keeps the router from starting."""
    if (config.retention, config.storage, config.discard) != (spec.retention, spec.storage, spec.discard):
        yield Finding(
            "failed",
            f"stream {spec.name} is of another version, with other rules ({config.retention}, {config.storage}, discard {config.discard})",
            OTHER_VERSION,
        )


def _stream(spec: StreamSpec, stream: Stream | None, offline: str) -> Iterator[Finding]:
    if offline:
        yield Finding(
            "failed", f"stream {spec.name} is offline: {offline}", f"A newer NATS wrote it: start that one again. {OTHER_VERSION}"
        )
        return
    if stream is None:
        is_read = spec.discard == "new"  # records are made again with the next one, and nobody waits for them
        remedy = "It is made again within seconds" if is_read else "It is made again with the next record"
        yield Finding("failed" if is_read else "warning", f"stream {spec.name} is not there: somebody deleted it", remedy)
        return
    config, state = stream.config, stream.state
    yield from other_rules(spec, config)
    # What drops its oldest is full in the long run, and a bucket keeps the last of each key.
    for used, limit, text in (
        (state.bytes, config.max_bytes, f"{size_text(state.bytes)} of {size_text(config.max_bytes)}"),
        (state.messages, config.max_msgs, f"{state.messages:,} of {config.max_msgs:,} messages"),
    ):
        if spec.discard == "new" and limit > 0 and used >= NEAR * limit:
            yield Finding(
                "failed" if used >= FULL * limit else "warning",
                f"stream {spec.name} is {used / limit:.0%} full: {text}; when it is full, requests are refused",
                "More comes than is computed: add workers (slipstream up --only decode), or send less",
            )


def _queues(streams: Sequence[Stream], leases: Sequence[WorkerLease]) -> Iterator[Finding]:
    """Workers that have nearly as much waiting as one may have, and what waits for workers that are gone."""
    names = {lease.instance: lease.name for lease in leases}
    for stream in streams:
        limit = stream.config.max_msgs_per_subject
        for subject, waiting in sorted(stream.state.subjects.items()):
            instance = subject.rpartition(".")[2]
            if instance not in names:
                yield Finding(
                    "warning",
                    f"{waiting} tasks in {stream.config.name} wait for {instance}, which is gone",
                    "Requests are moved by themselves within seconds; if this stays, no router runs: slipstream logs router",
                )
            elif 0 < limit <= waiting / NEAR:
                yield Finding("warning", f"{waiting} of at most {limit} tasks wait for {names[instance]}", "Is it stuck? slipstream logs")


# -- models ----------------------------------------------------------------------------------------------------------------
def card_findings(known: Container[str], leases: Sequence[WorkerLease], subjects: Subjects) -> list[Finding]:
    """Models that workers have and gateways cannot serve. `known`: ids of those with a card in the bucket."""
    without: dict[str, list[str]] = {}
    for lease in leases:
        if lease.role == "decode" and lease.state == "ready" and lease.model and lease.model not in known:
            without.setdefault(lease.model, []).append(lease.name)
    bucket = BUCKET_PREFIX + subjects.bucket("config")
    return [
        Finding(
            "failed",
            f"model {model} of {', '.join(names)} has no card in {bucket}: gateways that start now do not serve it",
            f"Workers put it back within seconds; if not, NATS cannot store it (slipstream logs nats):\n  nats stream rm {bucket}",
        )
        for model, names in without.items()
    ]


# -- indexes ---------------------------------------------------------------------------------------------------------------
def _indexes(indexes: Mapping[str, Index | None], leases: Sequence[WorkerLease]) -> Iterator[Finding]:
    """Sources that a router has heard nothing of: it sends their prompts elsewhere, or to be computed again."""
    for router, index in indexes.items():
        if index is None:
            yield Finding("warning", f"{router} does not tell what it knows", "slipstream logs router")
            continue
        unknown = [lease.name for lease in leases if lease.state == "ready" and (source := _source(lease)) and source not in index]
        if unknown:
            yield Finding(
                "warning",
                f"{router} knows nothing yet of the blocks at {', '.join(unknown)}",
                "Right after a start this is normal; later: slipstream logs router --level warning",
            )


def _source(lease: WorkerLease) -> str | None:
    """By what name the blocks of a process stand in an index: a store's are its host's."""
    if lease.role == "kvstore":
        return lease.host
    return lease.instance if lease.role in ("prefill", "decode") else None


# -- clocks ----------------------------------------------------------------------------------------------------------------
def clock_findings(clocks_s: Mapping[str, float]) -> list[Finding]:
    """Deadlines are told as time left, so skew loses no request; but logs, traces and ages are dated by it."""
    skewed = {name: offset for name, offset in clocks_s.items() if abs(offset) >= SKEW_S}
    return [
        Finding(
            "warning",
            f"the clock of {name} is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} this machine's",
            "Logs and traces of it are dated wrongly: chronyc makestep, or timedatectl set-ntp true",
        )
        for name, offset in sorted(skewed.items())
    ]
