"""What a service says about itself: numbers by name, spans of stages."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import NamedTuple

from shared.telemetry import propagation
from shared.telemetry.metrics import INSTRUMENTS, Instrument, Kind

Labels = tuple[tuple[str, str], ...]
"""Label names and values, sorted by name."""

Attribute = str | bool | int | float | list[str] | list[int] | list[float]
"""What a span may carry. Never text of a prompt or an answer."""


class Span(NamedTuple):
    """One finished stage. `parent_id` is "" at the root. Times are wall clock."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Attribute]


class Telemetry(ABC):
    """Names come from the table in `shared.telemetry.metrics`; another name raises KeyError, other labels ValueError.

    No method waits, and none raises for a fault outside the process: what cannot be kept is dropped and counted.
    """

    address: str = ""
    """host:port of /metrics; "" if it is not served."""
    sample: float = 1.0
    """Of traces that begin here, the part that is recorded. One that began elsewhere is recorded if its sender says so."""

    @abstractmethod
    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Add to a counter."""

    @abstractmethod
    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        """Set a gauge."""

    @abstractmethod
    def observe(self, name: str, value: float, /, *, exemplar: str = "", **labels: str) -> None:
        """Put a value into a histogram. `exemplar`: the traceparent of the request it belongs to."""

    def span(self, name: str, /, *, traceparent: str, start_ns: int, end_ns: int, minted: str = "", **attributes: Attribute) -> str:
        """Record a stage that is over, as a child of `traceparent`. Returns the traceparent of the stage itself.

        Times are wall clock, from `now_ns`. `minted`: the traceparent that `mint_traceparent` made for this span before it ended, so that
        others could be its children already. Without a `traceparent` that parses (and nothing minted) nothing is recorded and "" returned.
        """
        parent = propagation.parse(traceparent)
        own = propagation.parse(minted) if minted else propagation.child_of(parent) if parent else None
        if own is None:
            return ""
        if own.is_sampled:
            self._keep(Span(own.trace_id, own.span_id, parent.span_id if parent else "", name, start_ns, end_ns, attributes))
        return own.traceparent

    def mint_traceparent(self, span_of: str = "") -> str:
        """A traceparent for a span that begins now and is recorded later: in the trace of `span_of`, or of a trace of its own."""
        parent = propagation.parse(span_of)
        return (propagation.child_of(parent) if parent else propagation.new_trace(self.sample)).traceparent

    def begin(self, parent: str) -> str:
        """The traceparent of a stage of `parent`'s trace that begins now, for its own children; "" where there is no trace."""
        return self.mint_traceparent(parent) if parent else ""

    @staticmethod
    def now_ns() -> int:
        """The wall clock that spans of all processes share."""
        return time.time_ns()

    async def close(self) -> None:  # noqa: B027  # nothing to close by default
        """Write out what is kept, in 2 s at most. Idempotent."""

    @abstractmethod
    def _keep(self, span: Span) -> None: ...


def instrument_of(name: str, kind: Kind, labels: dict[str, str]) -> Instrument:
    """The row of the table. KeyError: no such row. ValueError: another kind or other labels than the row says."""
    instrument = INSTRUMENTS[name]
    if instrument.kind != kind or labels.keys() != set(instrument.labels):
        raise ValueError(f"{name} is a {instrument.kind} with labels {instrument.labels}, not a {kind} with {tuple(labels)}")
    return instrument


class NullTelemetry(Telemetry):
    """Keeps everything in plain dictionaries, for tests. Checks names and labels as strictly as the real one."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, Labels], float] = defaultdict(float)
        self.gauges: dict[tuple[str, Labels], float] = {}
        self.observations: defaultdict[tuple[str, Labels], list[float]] = defaultdict(list)
        self.spans: list[Span] = []

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        self.counts[self._key(name, "counter", labels)] += amount

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        self.gauges[self._key(name, "gauge", labels)] = value

    def observe(self, name: str, value: float, /, *, exemplar: str = "", **labels: str) -> None:
        self.observations[self._key(name, "histogram", labels)].append(value)

    def total(self, name: str, **labels: str) -> float:
        """A counter's sum over all label sets that contain `labels`."""
        return sum(value for (key, pairs), value in self.counts.items() if key == name and labels.items() <= dict(pairs).items())

    def _keep(self, span: Span) -> None:
        self.spans.append(span)

    @staticmethod
    def _key(name: str, kind: Kind, labels: dict[str, str]) -> tuple[str, Labels]:
        instrument_of(name, kind, labels)
        return name, tuple(sorted(labels.items()))
