"""How loaded each worker is: booked at dispatch, corrected by WorkerLoad, released on every end. Pure; times are injected."""

from __future__ import annotations

from typing import NamedTuple

from shared.messages.fleet import WorkerLease, WorkerLoad
from shared.types import InstanceId

BOOKING_TTL_S = 3600.0
"""A booking that nobody ended goes after the longest deadline."""
SEEN_AFTER_S = 1.0
"""After so long a report of the worker contains what was booked; until then the booking counts on top."""


class Booking(NamedTuple):
    """What one request takes of one worker."""

    num_blocks: int
    num_tokens: int
    """Prompt tokens it must compute."""
    booked_s: float


class WorkerState:
    """One worker: its lease, its last report, and what was booked."""

    def __init__(self, lease: WorkerLease) -> None:
        self.lease = lease
        self.report: WorkerLoad | None = None
        self.report_s = 0.0
        self.bookings: dict[str, Booking] = {}
        self.num_booked_blocks = 0
        self.num_booked_tokens = 0
        self.last_sent_s = 0.0
        """When something was last sent here: cold prompts go where nothing was sent for longest."""

    def book(self, key: str, booking: Booking) -> None:
        self.release(key)
        self.bookings[key] = booking
        self.num_booked_blocks += booking.num_blocks
        self.num_booked_tokens += booking.num_tokens
        self.last_sent_s = booking.booked_s

    def release(self, key: str) -> None:
        booking = self.bookings.pop(key, None)
        if booking is not None:
            self.num_booked_blocks -= booking.num_blocks
            self.num_booked_tokens -= booking.num_tokens

    @property
    def num_requests(self) -> int:
        """Requests there or on their way."""
        reported = self.report.num_running + self.report.num_waiting if self.report else 0
        return max(len(self.bookings), reported)

    @property
    def num_used_blocks(self) -> int:
        reported = self.report.num_used_blocks if self.report else 0
        return max(self.num_booked_blocks, reported + self._unseen("num_blocks"))

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens there or on their way, still to compute."""
        if self.report is None:
            return self.num_booked_tokens
        return min(self.report.num_queued_tokens + self._unseen("num_tokens"), max(self.num_booked_tokens, self.report.num_queued_tokens))

    def _unseen(self, field: str) -> int:
        """Booked too late to stand in the last report. Bookings are in order of time: look from the end."""
        total = 0
        for booking in reversed(self.bookings.values()):
            if booking.booked_s <= self.report_s - SEEN_AFTER_S:
                break
            total += getattr(booking, field) if booking.booked_s > self.report_s else 0
        return total


class Loads:
    """Every worker that is alive and ready, by instance, and which request is booked where."""

    def __init__(self) -> None:
        self.workers: dict[InstanceId, WorkerState] = {}
        self._places: dict[str, list[InstanceId]] = {}
        """`request_id:epoch` → workers that have it booked."""

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

    def report(self, load: WorkerLoad, now_s: float) -> None:
        """A worker's own word."""
        state = self.workers.get(load.worker)
        if state is None or (state.report is not None and load.sequence <= state.report.sequence):
            return
        state.report, state.report_s = load, now_s
        for ended in load.ended:
            self.release(f"{ended.request_id}:{ended.epoch}", load.worker)
        for key, booking in list(state.bookings.items()):
            if now_s - booking.booked_s <= BOOKING_TTL_S:
                break
            self.release(key, load.worker)

    def book(self, key: str, worker: InstanceId, booking: Booking) -> None:
        state = self.workers.get(worker)
        if state is not None:
            state.book(key, booking)
            places = self._places.setdefault(key, [])
            if worker not in places:
                places.append(worker)

    def release(self, key: str, worker: InstanceId | None = None) -> None:
        """The request is over at `worker`, or everywhere."""
        for place in [worker] if worker is not None else list(self._places.get(key, ())):
            if place in self.workers:
                self.workers[place].release(key)
            self._forget_place(key, place)

    def release_up_to(self, request_id: str, epoch: int) -> None:
        """Every attempt of the request up to `epoch` was cancelled."""
        for attempt in range(epoch + 1):
            self.release(f"{request_id}:{attempt}")

    def of_model(self, role: str, model: str) -> list[WorkerState]:
        return [state for state in self.workers.values() if state.lease.role == role and state.lease.model == model]

    def _forget_place(self, key: str, worker: InstanceId) -> None:
        places = self._places.get(key)
        if places is not None and worker in places:
            places.remove(worker)
            if not places:
                del self._places[key]
