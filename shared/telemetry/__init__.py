"""Metrics, spans and logs: best effort, never in the request path. The only importers of opentelemetry and prometheus_client.

`metrics` is the table of instruments, `propagation` the W3C traceparent, `setup` makes the `Telemetry` of a process.
Tests take `NullTelemetry`.
"""

from shared.telemetry.telemetry import NullTelemetry, Telemetry

__all__ = ["NullTelemetry", "Telemetry"]
