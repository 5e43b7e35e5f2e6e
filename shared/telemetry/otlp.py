"""Spans to an OpenTelemetry collector. Imported by `setup` only when an endpoint is set.

Written straight into OTLP's messages: the SDK's way there, by objects of its own for each span, takes ten times as long, which every
request would pay for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp

from shared.telemetry.otlp_http import OtlpHttp, pairs
from shared.telemetry.telemetry import Attribute, Span

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import KeyValue

_KINDS = {
    "router route": otlp.Span.SPAN_KIND_CONSUMER,
    "prefill compute": otlp.Span.SPAN_KIND_CONSUMER,
    "decode generate": otlp.Span.SPAN_KIND_CONSUMER,
    "decode load": otlp.Span.SPAN_KIND_CLIENT,
}
"""Stages that begin with a task from a queue, and the one that calls the KV store. All others answer a call."""
_SAMPLED = 1


class OtlpSink:
    """OTEL_EXPORTER_OTLP_* and OTEL_RESOURCE_ATTRIBUTES apply. Raises ValueError or OSError where they cannot be used."""

    label = "collector"
    every_s = 1.0

    def __init__(self, service: str, instance: str, role: str, version: str, environ: Mapping[str, str]) -> None:
        self._http = OtlpHttp(environ)
        self._about: dict[str, Attribute] = {
            **pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", "")),
            "service.namespace": "slipstream",
            "service.name": role,
            "service.instance.id": instance,
            "service.version": version,
            "slipstream.name": service,
        }
        self._version = version

    def write(self, spans: Sequence[Span]) -> None:
        """Tries for 2 s at most. Raises OSError if they did not arrive."""
        self._http.post(self.encode(spans))

    def close(self) -> None:
        """Nothing is kept open."""

    def encode(self, spans: Sequence[Span]) -> bytes:
        """An ExportTraceServiceRequest."""
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        for name, value in self._about.items():
            _put(resource.resource.attributes.add(), name, value)
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "slipstream", self._version
        for span in spans:
            _fill(scope.spans.add(), span)
        encoded: bytes = request.SerializeToString()
        return encoded


def _fill(message: otlp.Span, span: Span) -> None:
    message.trace_id, message.span_id = bytes.fromhex(span.trace_id), bytes.fromhex(span.span_id)
    message.parent_span_id = bytes.fromhex(span.parent_id)
    message.name, message.flags = span.name, _SAMPLED
    message.kind = _KINDS.get(span.name, otlp.Span.SPAN_KIND_SERVER)
    message.start_time_unix_nano, message.end_time_unix_nano = span.start_ns, span.end_ns
    error = span.attributes.get("error.type")
    if error:
        message.status.code, message.status.message = otlp.Status.STATUS_CODE_ERROR, str(error)
    add = message.attributes.add
    for name, value in span.attributes.items():
        _put(add(), name, value)


def _put(pair: KeyValue, name: str, value: Attribute) -> None:
    pair.key = name
    if isinstance(value, list):
        pair.value.array_value.SetInParent()  # an empty list, too, is a list
        for one in value:
            _set(pair.value.array_value.values.add(), one)
    else:
        _set(pair.value, value)


def _set(message: AnyValue, value: str | bool | int | float) -> None:
    if isinstance(value, str):
        message.string_value = value
    elif isinstance(value, bool):  # before int, of which it is one
        message.bool_value = value
    elif isinstance(value, int):
        message.int_value = value
    else:
        message.double_value = value
