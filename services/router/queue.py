"""Where requests wait. Order: class; then the tenant that was served least; then priority; then age. Pure: no clock, no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count

from shared.bus.base import Delivery
from shared.messages.request import GenerateRequest
from shared.messages.subjects import REQUEST_CLASSES
from shared.types import RequestClass


class Waiting:
    """One request that waits. Times are monotonic seconds."""

    __slots__ = ("delivery", "is_gone", "request", "taken_s")

    def __init__(self, request: GenerateRequest, delivery: Delivery, taken_s: float) -> None:
        self.request = request
        self.delivery = delivery
        self.taken_s = taken_s
        self.is_gone = False
        """Routed, refused or cancelled; its queue entry is skipped."""


Entry = tuple[int, int, Waiting]
"""(priority, arrival, request): the smaller first."""


class WaitingQueue:
    """A heap a tenant in each class; whose tenant had the fewest tokens routed goes first (a tenant that was away starts level)."""

    def __init__(self) -> None:
        self._arrivals = count()
        self._tenants: dict[RequestClass, dict[str, list[Entry]]] = {name: {} for name in REQUEST_CLASSES}
        self._served: dict[RequestClass, dict[str, float]] = {name: {} for name in REQUEST_CLASSES}
        self._by_id: dict[str, Waiting] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._by_id.values()))

    def add(self, waiting: Waiting) -> bool:
        """False: the same attempt waits here already (a redelivery), and has taken the new delivery."""
        request = waiting.request
        held = self._by_id.get(request.msg_id)
        if held is not None:
            held.delivery = waiting.delivery
            return False
        self._by_id[request.msg_id] = waiting
        tenants, served = self._tenants[request.request_class], self._served[request.request_class]
        if request.partition not in tenants:
            tenants[request.partition] = []
            served[request.partition] = max(served.get(request.partition, 0.0), self._least_served(request.request_class))
        heapq.heappush(tenants[request.partition], (request.priority, next(self._arrivals), waiting))
        return True

    def remove(self, waiting: Waiting) -> None:
        """Out of the queue, wherever it stands."""
        waiting.is_gone = True
        self._by_id.pop(waiting.request.msg_id, None)

    def in_order(self) -> Iterator[Waiting]:
        """Every waiting request, the next to route first. `routed` between two steps changes the order of what follows."""
        for name in REQUEST_CLASSES:
            skipped: list[tuple[str, Entry]] = []
            try:
                while (head := self._pop(name)) is not None:
                    skipped.append(head)
                    yield head[1][2]
            finally:
                for tenant, entry in skipped:
                    if not entry[2].is_gone:
                        heapq.heappush(self._tenants[name].setdefault(tenant, []), entry)

    def routed(self, waiting: Waiting) -> None:
        """It leaves, and its tokens count towards its tenant's share."""
        request = waiting.request
        served = self._served[request.request_class]
        served[request.partition] = served.get(request.partition, 0.0) + request.num_tokens + request.sampling.max_tokens
        self.remove(waiting)

    def _pop(self, name: RequestClass) -> tuple[str, Entry] | None:
        tenants, served = self._tenants[name], self._served[name]
        for tenant in sorted(tenants, key=lambda tenant: served.get(tenant, 0.0)):
            heap = tenants[tenant]
            while heap:
                entry = heapq.heappop(heap)
                if not entry[2].is_gone:
                    return tenant, entry
            del tenants[tenant]
        if not self._by_id:
            served.clear()  # nobody waits: everybody starts level
        return None

    def _least_served(self, name: RequestClass) -> float:
        served = self._served[name]
        return min((served.get(tenant, 0.0) for tenant in self._tenants[name] if self._tenants[name][tenant]), default=0.0)
