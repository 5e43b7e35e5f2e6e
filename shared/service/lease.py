"""This process's own entry in ss_workers: renewed every second, and noticed when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from shared.bus.base import Bucket, LinkClock
from shared.bus.streams import LEASE_TTL_S
from shared.errors import BusClosed, BusError, RevisionConflict
from shared.messages.codec import encode
from shared.messages.fleet import WorkerLease
from shared.telemetry import Telemetry

RENEW_S = 1.0

LeaseState = Literal["starting", "ready", "draining"]

log = logging.getLogger(__name__)


class OwnLease:
    """One key. It is lost when others may have held the process for dead while it lived:

    - it was not renewed for 3 s of the link clock, which stands still while we are cut off (so: the broker refused it), or
    - it was not renewed for 3 s because the process itself stood still, as `stood_still` tells, or
    - the key is gone although the bucket lived on: it expired while we were cut off and others were not, or somebody deleted it.

    A bucket that was wiped, or lost with its server, is no such case: the key is written again.
    """

    def __init__(
        self,
        bucket: Bucket,
        clock: LinkClock,
        describe: Callable[[], WorkerLease],
        telemetry: Telemetry,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._describe = describe
        self._telemetry = telemetry
        self._key = ""
        self._revision = 0
        self._sequence = 0
        self._renewed_s = 0.0
        """When the last renewal that succeeded began, by the link clock."""
        self._monotonic = monotonic
        self._began_s = 0.0
        """The same by real time."""
        self._gap_s = 0.0
        """Real time between the last two."""
        self._was_missed = False
        self.state: LeaseState = "starting"

    async def begin(self) -> None:
        """Write the key, whatever stands there, under the instance that the service has now. An earlier instance's key is deleted."""
        began_s, real_s = self._clock.now(), self._monotonic()
        lease = self._next()
        key = f"{lease.role}.{lease.instance}"
        if self._key not in ("", key):
            await self._bucket.delete(self._key)
        self._key = key
        self._revision = await self._bucket.put(self._key, encode(lease))
        self._renewed_s, self._began_s, self._gap_s, self._was_missed = began_s, real_s, 0.0, False

    def stood_still(self, seconds: float) -> None:
        """The event loop did nothing for so long. The next `renew` knows whether a renewal was missed by it."""
        since_s = max(self._gap_s, self._monotonic() - self._began_s)
        if seconds > LEASE_TTL_S - 2 * RENEW_S and since_s > LEASE_TTL_S:
            self._was_missed = True

    async def renew(self) -> bool:
        """Write the key again, in the present state. False: the lease was lost, nothing was written."""
        began_s, real_s = self._clock.now(), self._monotonic()
        if self._was_missed or began_s - self._renewed_s > LEASE_TTL_S:
            return False
        try:
            is_ours = await self._write()
        except BusClosed:
            raise
        except BusError as error:
            self._telemetry.count("lease_renewal_failures", reason=error.code)
            log.warning("the lease could not be renewed: %s", error)
            return True  # the clock decides
        if is_ours:
            self._renewed_s, self._began_s, self._gap_s = began_s, real_s, real_s - self._began_s
        return is_ours

    async def end(self) -> None:
        """Delete the key: others notice at once."""
        if self._key:
            await self._bucket.delete(self._key)

    async def _write(self) -> bool:
        try:
            self._revision = await self._bucket.update(self._key, encode(self._next()), self._revision)
            return True
        except RevisionConflict:
            return await self._find_again()

    async def _find_again(self) -> bool:
        """The key has not the revision that we gave it last. False: lost."""
        entries = [entry for entry in await self._bucket.entries() if entry.value is not None]
        ours = next((entry for entry in entries if entry.key == self._key), None)
        if ours is not None:  # an update that was stored though its answer was lost
            self._revision = await self._bucket.update(self._key, encode(self._next()), ours.revision)
            return True
        if max((entry.revision for entry in entries), default=0) > self._revision:
            return False
        self._revision = await self._bucket.put(self._key, encode(self._next()))  # the bucket is a new one
        return True

    def _next(self) -> WorkerLease:
        self._sequence += 1
        return msgspec.structs.replace(self._describe(), state=self.state, sequence=self._sequence)
