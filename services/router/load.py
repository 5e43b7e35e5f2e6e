"""How loaded each worker is: booked at dispatch, corrected by WorkerLoad, released on every end. Pure; times are injected.

The features that a decision reads are kept in arrays, one column a worker, and written when something happens, never when it is decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.messages.fleet import WorkerLease, WorkerLoad
from shared.types import InstanceId

BOOKING_TTL_S = 3600.0
"""A booking that nobody ended goes after the longest deadline."""
SETTLED_S = 10.0
"""A booking this old is either in its worker's report, or waits at prefill, or its end was lost."""
SLOTS_FACTOR = 2
"""A decode worker is sent at most so many requests for each slot."""
DEFAULT_PREFILL_TOKENS_PER_S = 1000.0

UNCACHED, LOAD, QUEUED, ACTIVE_BLOCKS, ACTIVE_REQUESTS, MEMORY_USED, UTILISATION, LATENCY = range(8)
"""Rows of the features. UNCACHED and LOAD are of one request, and filled in by whoever decides."""
NUM_FEATURES = 8

Floats = NDArray[np.float64]


class Booking(NamedTuple):
    """What one request takes of one worker."""

    num_blocks: int
    num_tokens: int
    """Prompt tokens it must compute."""
    booked_s: float


class WorkerState:
    """One worker: its lease, its last report, and what was booked. Every property is O(1)."""

    def __init__(self, lease: WorkerLease) -> None:
        self.lease = lease
        self.report: WorkerLoad | None = None
        self.report_s = 0.0
        self.bookings: dict[str, Booking] = {}
        self.num_booked_blocks = 0
        self.num_booked_tokens = 0
        self.num_new_blocks = 0
        """Booked after the last report; and so num_new_tokens."""
        self.num_new_tokens = 0
        self.last_sent_s = 0.0
        """When something was last sent here: cold prompts go where nothing was sent for longest."""

    def take(self, report: WorkerLoad, now_s: float) -> None:
        """Its own word about everything booked so far."""
        self.report, self.report_s = report, now_s
        self.num_new_blocks = self.num_new_tokens = 0

    def book(self, key: str, booking: Booking) -> None:
        self.release(key)
        self.bookings[key] = booking
        self._count(booking, 1)
        self.last_sent_s = booking.booked_s

    def release(self, key: str) -> None:
        booking = self.bookings.pop(key, None)
        if booking is not None:
            self._count(booking, -1)

    def _count(self, booking: Booking, sign: int) -> None:
        self.num_booked_blocks += sign * booking.num_blocks
        self.num_booked_tokens += sign * booking.num_tokens
        if booking.booked_s > self.report_s:
            self.num_new_blocks += sign * booking.num_blocks
            self.num_new_tokens += sign * booking.num_tokens

    @property
    def num_requests(self) -> int:
        """Requests there or on their way."""
        reported = self.report.num_running + self.report.num_waiting if self.report else 0
        return max(len(self.bookings), reported)

    @property
    def num_used_blocks(self) -> int:
        reported = self.report.num_used_blocks if self.report else 0
        return max(self.num_booked_blocks, reported + self.num_new_blocks)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens there or on their way, still to compute."""
        if self.report is None:
            return self.num_booked_tokens
        return min(self.report.num_queued_tokens + self.num_new_tokens, max(self.num_booked_tokens, self.report.num_queued_tokens))

    @property
    def prefill_tokens_per_s(self) -> float:
        """As measured there, or a guess."""
        return (self.report.prefill_tokens_per_s if self.report else 0.0) or DEFAULT_PREFILL_TOKENS_PER_S


class Pool:
    """The ready workers of one role and model. Column i of every array is `states[i]`; a change of members makes a new pool."""

    def __init__(self, states: Sequence[WorkerState]) -> None:
        self.states = list(states)
        self.row = {state.lease.instance: row for row, state in enumerate(self.states)}
        count = len(self.states)
        self.block_size = max((state.lease.block_size for state in self.states), default=1) or 1
        self.num_blocks: Floats = np.array([state.lease.num_blocks for state in self.states], dtype=np.float64)
        self.max_requests: Floats = np.array([SLOTS_FACTOR * state.lease.max_num_seqs for state in self.states], dtype=np.float64)
        self.largest = int(self.num_blocks.max()) if count else 0
        self.features: Floats = np.zeros((NUM_FEATURES, count))
        self.queued_tokens: Floats = np.zeros(count)
        self.tokens_per_s: Floats = np.ones(count)
        self.last_sent_s: Floats = np.zeros(count)
        for row in range(count):
            self.refresh(row)

    def refresh(self, row: int) -> None:
        """Something happened to a worker."""
        state, column = self.states[row], self.features[:, row]
        tokens, blocks, report = state.num_queued_tokens, state.num_used_blocks, state.report
        self.queued_tokens[row] = tokens
        self.tokens_per_s[row] = state.prefill_tokens_per_s
        self.last_sent_s[row] = state.last_sent_s
        column[QUEUED] = tokens / self.block_size
        column[ACTIVE_BLOCKS] = blocks
        column[ACTIVE_REQUESTS] = state.num_requests
        column[MEMORY_USED] = blocks / (state.lease.num_blocks or 1)
        if report is not None:
            column[UTILISATION] = report.utilisation
            column[LATENCY] = report.step_ms / 1000


class Loads:
    """Every worker that is alive and ready, by instance, and which request is booked where."""

    def __init__(self) -> None:
        self.workers: dict[InstanceId, WorkerState] = {}
        self._places: dict[str, list[InstanceId]] = {}
        """`request_id:epoch` → workers that have it booked."""
        self._pools: dict[tuple[str, str | None], Pool] = {}
        self._empty = Pool([])
        self._ended: set[str] | None = None

    def lease(self, lease: WorkerLease, is_alive: bool) -> None:
        """A worker came, changed or went."""
        if not is_alive or lease.state != "ready":
            state = self.workers.pop(lease.instance, None)
            for key in state.bookings if state else ():
                self._forget_place(key, lease.instance)
        elif lease.instance in self.workers:
            self.workers[lease.instance].lease = lease
        else:
            self.workers[lease.instance] = WorkerState(lease)
        group = (lease.role, lease.model)
        self._pools[group] = Pool([state for state in self.workers.values() if (state.lease.role, state.lease.model) == group])

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """A worker's own word."""
        state = self.workers.get(load.worker)
        if state is None or (state.report is not None and load.sequence <= state.report.sequence):
            return
        state.take(load, now_s)
        for ended in load.ended:
            self.release(f"{ended.request_id}:{ended.epoch}", load.worker)
        self._forget_lost(state, load, now_s)
        self._refresh(state)

    def _forget_lost(self, state: WorkerState, load: WorkerLoad, now_s: float) -> None:
        """Reports of an end can be lost. What is booked for long, beyond what the worker says it has, is over."""
        excess = len(state.bookings) - load.num_running - load.num_waiting
        if excess <= 0:
            return
        for key, booking in list(state.bookings.items()):
            age_s = now_s - booking.booked_s
            if excess <= 0 or age_s <= SETTLED_S:
                return
            if age_s > BOOKING_TTL_S or not self._waits_at_prefill(key, load.worker):
                self.release(key, load.worker)
                excess -= 1

    def _waits_at_prefill(self, key: str, worker: InstanceId) -> bool:
        others = (self.workers.get(place) for place in self._places.get(key, ()) if place != worker)
        return any(other is not None and other.lease.role == "prefill" for other in others)

    def book(self, key: str, worker: InstanceId, booking: Booking) -> None:
        state = self.workers.get(worker)
        if state is not None:
            state.book(key, booking)
            places = self._places.setdefault(key, [])
            if worker not in places:
                places.append(worker)
            self._refresh(state)

    def release(self, key: str, worker: InstanceId | None = None) -> None:
        """The request is over at `worker`, or everywhere."""
        if self._ended is not None:
            self._ended.add(key)
        for place in [worker] if worker is not None else list(self._places.get(key, ())):
            state = self.workers.get(place)
            if state is not None:
                state.release(key)
                self._refresh(state)
            self._forget_place(key, place)

    def release_up_to(self, request_id: str, epoch: int) -> None:
        """Every attempt of the request up to `epoch` was cancelled."""
        for attempt in range(epoch + 1):
            self.release(f"{request_id}:{attempt}")

    def watch_ends(self) -> set[str]:
        """Every request that is released from now on, known or not, until `watch_no_ends`."""
        self._ended = set()
        return self._ended

    def watch_no_ends(self) -> None:
        self._ended = None

    def pool(self, role: str, model: str) -> Pool:
        """The workers of a model as they are now."""
        return self._pools.get((role, model), self._empty)

    def _refresh(self, state: WorkerState) -> None:
        pool = self._pools[state.lease.role, state.lease.model]
        pool.refresh(pool.row[state.lease.instance])

    def _forget_place(self, key: str, worker: InstanceId) -> None:
        places = self._places.get(key)
        if places is not None and worker in places:
            places.remove(worker)
            if not places:
                del self._places[key]
