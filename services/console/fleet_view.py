"""The fleet as a visitor sees it: one look at the leases and loads over NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from services.console.bus_findings import OTHER_VERSION
from services.console.run_folder import Run
from shared.bus.base import Bus
from shared.bus.nats import connect
from shared.bus.streams import provision as provision_streams
from shared.config import ServiceConfig
from shared.errors import BusError, EnvironmentFault, MalformedMessage
from shared.messages.codec import decode
from shared.messages.fleet import ModelCard, WorkerLease, WorkerLoad
from shared.messages.subjects import Subjects
from shared.types import Role

_NUMBERED: tuple[Role, ...] = ("kvstore", "prefill", "decode")


@contextlib.asynccontextmanager
async def visit(run: Run) -> AsyncIterator[tuple[Bus, Subjects]]:
    """A connection to the NATS of `run`, as the console's user."""
    config = ServiceConfig(
        name="console",
        namespace=run.namespace,
        nats_url=run.nats_url,
        nats_user=run.nats_user,
        nats_password_file=run.nats_password_file,
        nats_creds=run.nats_creds,
    )
    # A visitor's library logs are nobody's business: what matters comes as an error.
    logging.getLogger().addHandler(logging.NullHandler())
    bus = await connect(config, name="console")
    try:
        yield bus, Subjects(run.namespace)
    finally:
        await bus.close()


async def read_leases(bus: Bus, subjects: Subjects) -> list[WorkerLease]:
    """Every process with a lease, by name. A lease that does not parse (another version) is left out."""
    bucket = await bus.bucket(subjects.bucket("workers"))
    leases = []
    for entry in await bucket.entries():
        with contextlib.suppress(MalformedMessage):
            if entry.value is not None:
                leases.append(decode(WorkerLease, entry.value))
    return sorted(leases, key=lambda lease: lease.name)


async def read_model_names(bus: Bus, subjects: Subjects) -> dict[str, str]:
    """Model id, as leases have it → what people call it."""
    bucket = await bus.bucket(subjects.bucket("config"))
    names = {}
    for entry in await bucket.entries():
        kind, _, model = entry.key.partition(".")
        if kind == "model" and entry.value is not None:
            with contextlib.suppress(MalformedMessage):
                names[model] = decode(ModelCard, entry.value).name
    return names


async def read_loads(bus: Bus, subjects: Subjects, instances: set[str], limit_s: float = 1.2) -> dict[str, WorkerLoad]:
    """The next load of each of `instances`, as far as they come within `limit_s` (workers report twice a second)."""
    loads: dict[str, WorkerLoad] = {}
    subscription = await bus.subscribe(subjects.load_event("*"))
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                if not instances:
                    return loads
                async for message in subscription:
                    with contextlib.suppress(MalformedMessage):
                        load = decode(WorkerLoad, message.payload)
                        loads[load.worker] = load
                    if instances <= loads.keys():
                        return loads
    finally:
        await subscription.close()
    return loads


async def taken_numbers(run: Run, *, provision: bool) -> dict[Role, int]:
    """Make the streams and buckets (`provision`), or find for each role the first number that no running process has.

    EnvironmentFault if NATS has streams of another version.
    """
    async with visit(run) as (bus, subjects):
        if provision:
            try:
                await provision_streams(bus, subjects)
            except BusError as error:
                raise EnvironmentFault(error.message, remedy=error.remedy or OTHER_VERSION) from error
            return {}
        leases = await read_leases(bus, subjects)
    first: dict[Role, int] = {}
    for role in _NUMBERED:
        numbers = [int(tail) for lease in leases if lease.role == role and (tail := lease.name.rpartition("-")[2]).isdecimal()]
        first[role] = max(numbers, default=-1) + 1
    return first
