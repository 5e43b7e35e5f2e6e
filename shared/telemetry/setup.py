"""Makes the telemetry of one process from its settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from shared.config import ServiceConfig
from shared.telemetry.live import LiveTelemetry
from shared.telemetry.metrics import sections_of
from shared.telemetry.span_writer import SpanSink
from shared.telemetry.trace_file import TraceFile
from shared.types import Role


def open_telemetry(config: ServiceConfig, role: Role, instance: str, version: str, environ: Mapping[str, str]) -> LiveTelemetry:
    """Serve /metrics, open the trace file, reach for a collector if OTEL_EXPORTER_OTLP_ENDPOINT names one. Raises EnvironmentFault."""
    name = config.name or role
    sinks: list[SpanSink] = []
    if config.trace_dir is not None:
        sinks.append(TraceFile(config.trace_dir / f"{name}.jsonl", name, instance))
    if environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        # Not at the top of the file: the SDK and its HTTP client take longer to import than the rest of a service.
        otlp = importlib.import_module("shared.telemetry.otlp")
        sinks.append(otlp.OtlpSink(name, instance, role, version))
    telemetry = LiveTelemetry(sinks, sections_of(role))
    telemetry.sample = config.trace_sample
    telemetry.serve(config.metrics_host, config.metrics_port)
    return telemetry
