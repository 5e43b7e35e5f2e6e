"""From lease to lease deleted: the life of one service in a running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from shared.bus.discovery import Advertisement, advertise
from shared.bus.streams import provision
from shared.errors import BusClosed, BusError
from shared.service.lease import RENEW_S, LeaseState, OwnLease
from shared.service.service import Service
from shared.tasks import cancel_all

STOP_S = 5.0
MEASURE_S = 0.25
STILL_S = 1.0
STATES: tuple[LeaseState, ...] = ("starting", "ready", "draining")

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Service)


class Life:
    """Begins and ends one service over a connected bus; `Service` lists what is guaranteed."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._lease: OwnLease | None = None
        self._advertisement: Advertisement | None = None
        self._shown: dict[str, str] = {}
        """Labels of service_info."""

    async def begin(self) -> None:
        """Returns when the service is ready. If it cannot, everything is undone and the error goes on."""
        service = self.service
        await provision(service.bus, service.subjects)
        bucket = await service.bus.bucket(service.subjects.bucket("workers"))
        self._lease = OwnLease(bucket, service.bus.clock, service.describe, service.telemetry)
        try:
            await self._enter("starting")
            service.spawn(self._keep_lease(self._lease), "lease")
            service.spawn(self._measure(self._lease), "measure")
            await service.fleet.open(service.spawn)
            await service.start()
            await self._enter("ready")
            self._touch()
            await self._advertise()
        except BaseException:
            await self._leave()
            raise

    async def end(self) -> None:
        """Drain and stop."""
        service = self.service
        log.info("draining, for %g s at most", service.service_config.drain_s)
        await self._withdraw()
        self._untouch()
        with contextlib.suppress(BusError):  # cut off: others will see the lease end
            await self._enter("draining")
        try:
            await _bounded(service.drain(), service.service_config.drain_s, "drained: what is left is given back")
        finally:
            try:
                await _bounded(service.stop(), STOP_S, "stopped")
            finally:
                await self._leave()

    async def abandon(self) -> None:
        """After a crash: nothing is drained, because nobody knows what still holds."""
        await self._leave()

    async def _leave(self) -> None:
        self._untouch()
        await self._withdraw()
        await self.service.cancel_tasks()
        await self.service.fleet.close()
        if self._lease is not None:
            with contextlib.suppress(BusError):  # it runs out by itself
                await self._lease.end()

    async def _enter(self, state: LeaseState) -> None:
        assert self._lease
        self._lease.state = state
        await self._lease.begin()
        for each in STATES:
            self.service.telemetry.gauge("service_state", each == state, state=each)
        self._show_identity()

    def _touch(self) -> None:
        if path := self.service.service_config.ready_file:
            try:
                path.touch()
            except OSError as error:
                log.warning("the ready file %s cannot be written: %s", path, error.strerror)

    def _untouch(self) -> None:
        if path := self.service.service_config.ready_file:
            with contextlib.suppress(OSError):  # its reader looks at its age too
                path.unlink(missing_ok=True)

    def _show_identity(self) -> None:
        lease = self.service.describe()
        if self._shown:
            self.service.telemetry.gauge("service_info", 0, **self._shown)
        self._shown = {"role": lease.role, "name": lease.name, "instance": lease.instance, "version": lease.version}
        self.service.telemetry.gauge("service_info", 1, **self._shown)

    async def _keep_lease(self, lease: OwnLease) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if await lease.renew():
                if lease.state == "ready":
                    self._touch()
                continue
            log.error("the lease was lost while the process lived")
            self.service.telemetry.count("leases_lost")
            if lease.state == "ready":
                await self.service.lease_lost()
            await self._begin_again(lease)

    async def _begin_again(self, lease: OwnLease) -> None:
        while True:
            try:
                await lease.begin()
                break
            except BusClosed:
                raise
            except BusError as error:
                log.warning("the lease could not be written again: %s", error)
                await asyncio.sleep(RENEW_S)
        log.warning("the lease is held again, as instance %s", self.service.instance)
        self._show_identity()
        if self._advertisement is not None:
            await self._withdraw()
            await self._advertise()

    async def _advertise(self) -> None:
        service = self.service
        lease = service.describe()
        self._advertisement = await advertise(
            service.bus,
            name=f"slipstream-{service.role}",
            version=lease.version,
            instance=service.instance,
            description=service.detail(),
            metadata={"name": lease.name, "model": lease.model or ""},
            endpoints=service.endpoints(),
            stats=service.endpoint_stats,
        )

    async def _withdraw(self) -> None:
        advertisement, self._advertisement = self._advertisement, None
        if advertisement is not None:
            with contextlib.suppress(BusError):  # cut off: nobody asks us any more
                await advertisement.close()

    async def _measure(self, lease: OwnLease) -> None:
        """How late the event loop is, and what the bus has counted since the last time."""
        loop, telemetry, counts = asyncio.get_running_loop(), self.service.telemetry, self.service.bus.counts
        told: Counter[str] = Counter()
        while True:
            due_s = loop.time() + MEASURE_S
            await asyncio.sleep(MEASURE_S)
            lag_s = max(loop.time() - due_s, 0.0)
            telemetry.observe("event_loop_lag_seconds", lag_s)
            if lag_s > STILL_S:
                log.warning("the event loop stood still for %.1f s", lag_s)
                lease.stood_still(lag_s)
            for event, number in (counts - told).items():
                telemetry.count("bus_events", number, event=event)
            told = counts.copy()


async def _bounded(work: Coroutine[Any, Any, None], limit_s: float, what: str) -> None:
    task = asyncio.create_task(work, name=what)
    await asyncio.wait([task], timeout=limit_s)
    if task.done():
        task.result()
    else:
        log.warning("after %g s not %s", limit_s, what)
        await cancel_all([task])


@contextlib.asynccontextmanager
async def run_service(service: S) -> AsyncIterator[S]:
    """The whole life over a bus that is connected already, for tests and for processes with several services.

    Bus and telemetry stay open: they are the caller's. A spawned task that failed raises its error at the end of the block.
    """
    life = Life(service)
    await life.begin()
    try:
        yield service
    finally:
        if service.crash is None:
            await life.end()
        else:
            await life.abandon()
    if service.crash is not None:
        raise service.crash
