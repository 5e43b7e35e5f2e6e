"""What both front doors do with a call: let it in, run it, have it recorded."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from services.gateway.admission import Admission, Admitted, Client
from services.gateway.generation import Door, Generation
from services.gateway.ledger import Ledger
from services.gateway.openai import ChatBody, CompletionBody, GenerationBody
from services.gateway.sessions import Sessions
from shared.bus.base import Bus
from shared.errors import NoCapacity, Overloaded, SlipstreamError
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.telemetry.logs import concern
from shared.types import InstanceId


class Desk:
    """Limits around generations."""

    def __init__(
        self, bus: Bus, subjects: Subjects, telemetry: Telemetry, gateway: InstanceId, admission: Admission, sessions: Sessions, limit: int
    ) -> None:
        self._ledger = Ledger(bus, subjects, telemetry, gateway)
        self._sessions = sessions
        self._limit = limit
        self.admission = admission
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return len(self._sessions)

    async def admit(self, body: GenerationBody, client: Client) -> Admitted:
        """Raises a RequestError for whatever cannot be served. From here on, what the calling task logs carries the call's ids."""
        concern("", client.traceparent)
        started_ns = time.time_ns()
        try:
            return await self._admit(body, client)
        except SlipstreamError as error:
            self._ledger.refused(body, client, started_ns, error)
            raise

    async def _admit(self, body: GenerationBody, client: Client) -> Admitted:
        if self.is_draining:
            raise NoCapacity("this gateway is shutting down", retry_after_s=1.0)
        if self.num_open >= self._limit:
            raise Overloaded(f"{self._limit} requests are in work already", retry_after_s=1.0)
        if isinstance(body, ChatBody):
            return await self.admission.chat(body, client)
        assert isinstance(body, CompletionBody)
        return await self.admission.completion(body, client)

    @contextlib.asynccontextmanager
    async def generation(self, admitted: Admitted, body: GenerationBody, client: Client, door: Door) -> AsyncIterator[Generation]:
        """The generation, begun; whatever way it ends it is cancelled behind us, counted and recorded."""
        concern(admitted.requests[0].request_id, client.traceparent)
        generation = Generation(admitted, body, self._sessions, door, client.tenant)
        error: BaseException | None = None
        try:
            async with generation:
                yield generation
        except BaseException as raised:
            error = raised
            raise
        finally:
            await self._ledger.ended(generation, client, error)
