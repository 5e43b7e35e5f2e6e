"""Spans to an OpenTelemetry collector over HTTP. Imported by `setup` only when an endpoint is set: the SDK takes 0.2 s to import."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from shared.telemetry.telemetry import Span

EXPORT_TIMEOUT_S = 2.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {
    "router route": SpanKind.CONSUMER,
    "prefill compute": SpanKind.CONSUMER,
    "decode generate": SpanKind.CONSUMER,
    "decode load": SpanKind.CLIENT,
}
"""Stages that begin with a task from a queue, and the one that calls the KV store. All others answer a call."""


class OtlpSink:
    """The SDK's exporter without its batch processor, whose full queue would drop spans uncounted. OTEL_EXPORTER_OTLP_* variables apply."""

    label = "collector"

    def __init__(self, service: str, instance: str, role: str, version: str) -> None:
        self._exporter = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
        self._resource = Resource.create(
            {
                "service.namespace": "slipstream",
                "service.name": role,
                "service.instance.id": instance,
                "service.version": version,
                "slipstream.name": service,
            }
        )
        self._scope = InstrumentationScope("slipstream", version)

    def write(self, spans: Sequence[Span]) -> None:
        """Retries for 2 s at most. Raises OSError if they did not arrive."""
        if self._exporter.export([self._readable(span) for span in spans]) is not SpanExportResult.SUCCESS:
            raise OSError("it is gone, does not answer, or refuses them")

    def close(self) -> None:
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves this one untyped

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = int(span.trace_id, 16)
        parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=True, trace_flags=_SAMPLED) if span.parent_id else None
        error = span.attributes.get("error.type")
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            kind=_KINDS.get(span.name, SpanKind.SERVER),
            resource=self._resource,
            attributes=span.attributes,
            status=Status(StatusCode.ERROR, str(error)) if error else Status(StatusCode.UNSET),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
