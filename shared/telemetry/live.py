"""The telemetry of a running process: numbers in a registry of its own, served on /metrics; spans through a `SpanWriter` for each sink."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter as Tally
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar, cast

import prometheus_client
from prometheus_client.metrics import MetricWrapperBase

from shared.errors import EnvironmentFault
from shared.telemetry import propagation
from shared.telemetry.metrics import Instrument, Kind
from shared.telemetry.metrics_server import MetricsServer
from shared.telemetry.span_writer import SpanSink, SpanWriter
from shared.telemetry.telemetry import Span, Telemetry, instrument_of

CLOSE_S = 2.0
MAX_LABEL_SETS = 1000
"""More of one instrument than this would let a label that runs wild eat the memory: the rest is counted as `other`."""

WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that mean every interface: good to listen on, of no use to whoever wants to connect."""

M = TypeVar("M", bound=MetricWrapperBase)
Key = tuple[object, ...]
"""(name, *label pairs as the caller ordered them): one dictionary look-up finds the series, whatever the order."""


class LiveTelemetry(Telemetry):
    """`sections`: rows that stand on /metrics from the start, so that a counter that never counted reads 0."""

    def __init__(self, sinks: Sequence[SpanSink] = (), sections: Sequence[Instrument] = ()) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # else a second series for every counter
        self.registry = prometheus_client.CollectorRegistry(auto_describe=False)
        prometheus_client.ProcessCollector(registry=self.registry)
        self._metrics: dict[str, MetricWrapperBase] = {}
        self._num_label_sets: Tally[str] = Tally()
        self._counters: dict[Key, prometheus_client.Counter] = {}
        self._gauges: dict[Key, prometheus_client.Gauge] = {}
        self._histograms: dict[Key, prometheus_client.Histogram] = {}
        self._server: MetricsServer | None = None
        for instrument in sections:
            self._metric(instrument)
        self._writers = [SpanWriter(sink, self._dropped) for sink in sinks]

    def count(self, name: str, amount: float = 1, /, **labels: str) -> None:
        key = (name, *labels.items())
        series = self._counters.get(key)
        if series is None:
            series = self._counters[key] = self._series(prometheus_client.Counter, "counter", name, labels)
        series.inc(amount)

    def gauge(self, name: str, value: float, /, **labels: str) -> None:
        key = (name, *labels.items())
        series = self._gauges.get(key)
        if series is None:
            series = self._gauges[key] = self._series(prometheus_client.Gauge, "gauge", name, labels)
        series.set(value)

    def observe(self, name: str, value: float, /, *, exemplar: str = "", **labels: str) -> None:
        key = (name, *labels.items())
        series = self._histograms.get(key)
        if series is None:
            series = self._histograms[key] = self._series(prometheus_client.Histogram, "histogram", name, labels)
        context = propagation.parse(exemplar) if exemplar else None
        series.observe(value, {"trace_id": context.trace_id} if context and context.is_sampled else None)

    def serve(self, host: str, port: int) -> None:
        """Serve /metrics from threads of their own; `address` says where. Raises EnvironmentFault if the port is taken."""
        try:
            self._server = MetricsServer(host, port, self.registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise EnvironmentFault(
                f"/metrics cannot listen on {host}:{port}: {reason}", remedy="Set SS_METRICS_PORT, or 0 for any"
            ) from error
        self.address = f"{reachable(host)}:{self._server.port}"

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        deadline_s = time.monotonic() + CLOSE_S
        writers, self._writers = self._writers, []
        server, self._server = self._server, None
        for writer in writers:
            writer.begin_close()
        if server:
            closer = server.begin_close()
            with suppress(OSError), socket.create_connection(server.address, timeout=CLOSE_S):
                pass  # wakes the server's loop, which looks for the end only every half second
            closer.join(deadline_s - time.monotonic())
            server.end_close()
        for writer in writers:
            writer.join(deadline_s - time.monotonic())

    def _keep(self, span: Span) -> None:
        for writer in self._writers:
            writer.put(span)

    def _dropped(self, num_spans: int, reason: str) -> None:
        self.count("telemetry_dropped", num_spans, reason=reason)

    def _series(self, metric_type: type[M], kind: Kind, name: str, labels: dict[str, str]) -> M:
        """The series of one label set, made at its first use."""
        instrument = instrument_of(name, kind, labels)
        metric = cast(M, self._metric(instrument))
        if not labels:
            return metric
        self._num_label_sets[name] += 1
        if self._num_label_sets[name] > MAX_LABEL_SETS:
            self.count("telemetry_label_overflow")
            labels = dict.fromkeys(labels, "other")
        return metric.labels(**labels)

    def _metric(self, instrument: Instrument) -> MetricWrapperBase:
        metric = self._metrics.get(instrument.name)
        if metric is None:
            metric = self._metrics[instrument.name] = _make(instrument, self.registry)
        return metric


def reachable(host: str) -> str:
    """What others call the machine that listens on `host`: of every interface, by its name (a container's is known on its networks)."""
    if host in WILDCARDS:
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _make(instrument: Instrument, registry: prometheus_client.CollectorRegistry) -> MetricWrapperBase:
    name, text, labels = instrument.exposed_name, instrument.help, instrument.labels
    match instrument.kind:
        case "counter":
            return prometheus_client.Counter(name, text, labels, registry=registry)
        case "gauge":
            return prometheus_client.Gauge(name, text, labels, registry=registry)
        case "histogram":
            return prometheus_client.Histogram(name, text, labels, buckets=instrument.buckets, registry=registry)
