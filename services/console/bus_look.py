"""What NATS and the routers say of themselves, and what time it is elsewhere: read for `doctor`."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime

import msgspec

from shared.bus.base import Bus
from shared.errors import BusError
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects

TIMEOUT_S = 2.0
HTTP_DATE_S = 1.0
"""What an HTTP date tells apart."""

Index = dict[str, dict[str, int]]
"""Source → tier → number of blocks."""


class StreamConfig(msgspec.Struct, frozen=True):
    """As NATS tells it. -1: unlimited."""

    name: str
    retention: str
    storage: str
    discard: str
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1


class StreamState(msgspec.Struct, frozen=True):
    messages: int
    bytes: int
    last_ts: datetime
    subjects: dict[str, int] = {}
    """Subject → messages; only where it was asked for."""


class Stream(msgspec.Struct, frozen=True):
    config: StreamConfig
    state: StreamState
    ts: datetime
    """When the server said so, by its own clock."""


class _StreamList(msgspec.Struct, frozen=True):
    streams: list[Stream] | None = None
    offline: dict[str, str] = {}
    """Those that this server cannot serve, and why."""


class BusLook(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `None`: was not told (another's NATS, or no right to ask)."""

    streams: dict[str, Stream] | None
    """By name."""
    offline: dict[str, str] = {}
    """Stream that NATS has and cannot serve → why."""
    indexes: dict[str, Index | None]
    """Router's name → its index."""
    clocks_s: dict[str, float]
    """Process, or `NATS` → how far its clock is ahead of ours; those that could be read."""


async def look_at_bus(bus: Bus, subjects: Subjects, leases: Sequence[WorkerLease]) -> BusLook:
    """Asks everything at once; a silent one costs 2 s."""
    routers = [lease for lease in leases if lease.role == "router"]
    told, indexes, clocks_s = await asyncio.gather(
        _streams(bus, subjects),
        asyncio.gather(*(_index(bus, subjects, router) for router in routers)),
        _clocks(leases),
    )
    return BusLook(
        streams=told.streams,
        offline=told.offline,
        indexes={router.name: index for router, index in zip(routers, indexes, strict=True)},
        clocks_s=clocks_s | ({} if told.clock_s is None else {"NATS": told.clock_s}),
    )


async def nats_clock_s(bus: Bus, subjects: Subjects) -> float | None:
    """How far NATS' clock is ahead of ours; None: it does not tell."""
    return (await _streams(bus, subjects)).clock_s


class _Told(msgspec.Struct, frozen=True):
    """What NATS says of its streams; `clock_s`: how far it is ahead."""

    streams: dict[str, Stream] | None = None
    offline: dict[str, str] = {}
    clock_s: float | None = None


async def _streams(bus: Bus, subjects: Subjects) -> _Told:
    """Every stream by its name, the task queues with what each worker has waiting."""
    try:
        began_s = time.time()
        reply = await bus.request("$JS.API.STREAM.LIST", b"", timeout_s=TIMEOUT_S)
        middle_s = (began_s + time.time()) / 2
        told = msgspec.json.decode(reply.payload, type=_StreamList)
        streams = {stream.config.name: stream for stream in told.streams or ()}
        for name in (subjects.stream("prefill"), subjects.stream("decode")):
            if name in streams:
                detailed = await bus.request(f"$JS.API.STREAM.INFO.{name}", b'{"subjects_filter":">"}', timeout_s=TIMEOUT_S)
                streams[name] = msgspec.json.decode(detailed.payload, type=Stream)
    except (BusError, msgspec.MsgspecError):
        return _Told()  # shown as a finding of its own
    return _Told(streams, told.offline, next((stream.ts.timestamp() - middle_s for stream in streams.values()), None))


async def _index(bus: Bus, subjects: Subjects, router: WorkerLease) -> Index | None:
    try:
        reply = await bus.request(subjects.router(router.instance, "index"), b"", timeout_s=TIMEOUT_S)
        return msgspec.json.decode(reply.payload, type=Index)
    except (BusError, msgspec.MsgspecError):
        return None  # shown as a finding of its own


async def _clocks(leases: Sequence[WorkerLease]) -> dict[str, float]:
    asked = [lease for lease in leases if lease.metrics_address]
    offsets = await asyncio.gather(*(asyncio.to_thread(clock_offset_s, lease.metrics_address) for lease in asked))
    return {lease.name: offset for lease, offset in zip(asked, offsets, strict=True) if offset is not None}


def clock_offset_s(address: str, now_s: Callable[[], float] = time.time) -> float | None:
    """How far the clock behind host:port is ahead of ours, within half a second and the way there; None: it does not say."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
    try:
        began_s = now_s()
        connection.request("GET", "/clock")  # there is no such page, and the refusal is dated too: cheaper than all the metrics
        date = connection.getresponse().headers.get("date")
        middle_s = (began_s + now_s()) / 2
        return parsedate_to_datetime(date).timestamp() + HTTP_DATE_S / 2 - middle_s if date else None
    except (OSError, http.client.HTTPException, ValueError):
        return None  # that it is silent is said where its metrics are read
    finally:
        connection.close()
