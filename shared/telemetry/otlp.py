"""Spans to an OpenTelemetry collector over HTTP. Imported by `setup` only when an endpoint is set: the SDK takes 0.2 s to import."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from shared.telemetry.telemetry import Span
from shared.telemetry.trace_file import OnDrop

EXPORT_TIMEOUT_S = 2.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class _Exporter(OTLPSpanExporter):
    """Tells what did not arrive: the SDK itself only logs it."""

    def __init__(self) -> None:
        super().__init__(timeout=EXPORT_TIMEOUT_S)
        self.on_drop: OnDrop = lambda num_spans, reason: None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.on_drop(len(spans), "collector")
        return result


class OtlpSink:
    """Hands spans to the SDK's batch processor: its queue is bounded, its thread does the sending. OTEL_* variables apply."""

    def __init__(self, service: str, instance: str, role: str, version: str) -> None:
        self._exporter = _Exporter()
        self._processor = BatchSpanProcessor(self._exporter)
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

    def count_drops(self, on_drop: OnDrop) -> None:
        self._exporter.on_drop = on_drop

    def write(self, spans: Sequence[Span]) -> None:
        for span in spans:
            self._processor.on_end(self._readable(span))

    def close(self) -> None:
        self._processor.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves this one untyped

    def _readable(self, span: Span) -> ReadableSpan:
        trace_id = int(span.trace_id, 16)
        parent = SpanContext(trace_id, int(span.parent_id, 16), is_remote=True, trace_flags=_SAMPLED) if span.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=SpanContext(trace_id, int(span.span_id, 16), is_remote=False, trace_flags=_SAMPLED),
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )
