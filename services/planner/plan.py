"""The plan in bucket ss_config, of which there is one, whoever plans."""

from __future__ import annotations

import logging

from shared.bus.base import Bucket, Bus
from shared.errors import MalformedMessage, RevisionConflict
from shared.messages.codec import decode, encode
from shared.messages.fleet import Plan
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry

KEY = "plan"

log = logging.getLogger(__name__)


class PlanRecord:
    """Writes a plan only over the one that it has read: two planners never overwrite one another unseen."""

    def __init__(self, bus: Bus, subjects: Subjects, telemetry: Telemetry) -> None:
        self._bus = bus
        self._bucket_name = subjects.bucket("config")
        self._subject = subjects.plan()
        self._telemetry = telemetry

    async def publish(self, plan: Plan) -> Plan | None:
        """Number `plan` after the one that is there, write it, then tell everybody. None: somebody else wrote first; theirs holds."""
        bucket = await self._bus.bucket(self._bucket_name)
        try:
            numbered = await self._write(bucket, plan)
        except RevisionConflict:
            self._telemetry.count("planner_conflicts")
            log.warning("another planner wrote its plan first")
            return None
        await self._bus.publish(self._subject, encode(numbered))
        self._telemetry.count("planner_plans")
        return numbered

    async def _write(self, bucket: Bucket, plan: Plan) -> Plan:
        entry = await bucket.get(KEY)
        numbered = _numbered(plan, self._sequence(entry.value) + 1 if entry and entry.value else 1)
        if entry is None:
            await bucket.create(KEY, encode(numbered))
        else:
            await bucket.update(KEY, encode(numbered), entry.revision)
        return numbered

    def _sequence(self, value: bytes) -> int:
        try:
            return decode(Plan, value).sequence
        except MalformedMessage as error:  # another version's: replaced, and numbered from the start
            self._telemetry.count("planner_malformed", kind="plan")
            log.warning("the plan in %s cannot be read: %s", self._bucket_name, error)
            return 0


def _numbered(plan: Plan, sequence: int) -> Plan:
    return Plan(sequence, plan.num_prefill, plan.num_decode, plan.max_num_seqs, plan.reason, plan.observed)
