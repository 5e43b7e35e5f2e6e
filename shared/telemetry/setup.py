"""Makes the telemetry of one process from its settings."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from shared.config import ServiceConfig
from shared.errors import EnvironmentFault
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
        # Not at the top of the file: protobuf and its messages are of no use to a service without a collector.
        otlp = importlib.import_module("shared.telemetry.otlp")
        try:
            sinks.append(otlp.OtlpSink(name, instance, role, version, environ))
        except (ValueError, OSError) as error:
            raise EnvironmentFault(f"no collector can be used: {error}", remedy="Mend or unset OTEL_EXPORTER_OTLP_ENDPOINT") from error
    telemetry = LiveTelemetry(sinks, sections_of(role))
    telemetry.sample = config.trace_sample
    telemetry.serve(config.metrics_host, config.metrics_port)
    return telemetry
