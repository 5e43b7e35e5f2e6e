"""What the decode workers last said of themselves, summed up under the names that vLLM's dashboards ask for."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

from shared.bus.base import Bus
from shared.errors import MalformedMessage
from shared.fleet import Fleet
from shared.messages.codec import decode
from shared.messages.fleet import WorkerLoad
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import InstanceId, ModelId

log = logging.getLogger(__name__)


class WorkerLoads:
    """`name_of` gives a model's name; without one the model is not shown yet."""

    def __init__(self, bus: Bus, subjects: Subjects, fleet: Fleet, telemetry: Telemetry, name_of: Callable[[ModelId], str | None]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._fleet = fleet
        self._telemetry = telemetry
        self._name_of = name_of
        self._last: dict[InstanceId, WorkerLoad] = {}

    async def follow(self) -> None:
        """For ever."""
        async for message in await self._bus.subscribe(self._subjects.load_event("*")):
            try:
                load = decode(WorkerLoad, message.payload)
            except MalformedMessage as error:
                self._telemetry.count("malformed_messages", kind="load")
                log.warning("a load report was dropped: %s", error)
                continue
            if load.role == "decode":
                self._last[load.worker] = load
                self._show()

    def _show(self) -> None:
        self._last = {worker: load for worker, load in self._last.items() if self._fleet.is_alive(worker)}
        by_model: defaultdict[str, list[WorkerLoad]] = defaultdict(list)
        for load in self._last.values():
            name = self._name_of(load.model)
            if name is not None:
                by_model[name].append(load)
        for name, loads in by_model.items():
            self._telemetry.gauge("vllm:num_requests_running", sum(load.num_running for load in loads), model_name=name)
            self._telemetry.gauge("vllm:num_requests_waiting", sum(load.num_waiting for load in loads), model_name=name)
            num_used, num_blocks = sum(load.num_used_blocks for load in loads), sum(load.num_blocks for load in loads)
            self._telemetry.gauge("vllm:kv_cache_usage_perc", num_used / max(num_blocks, 1), model_name=name)
