"""An OpenTelemetry collector of our own: takes OTLP over HTTP and keeps what came, or is as slow as it is told to be."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


class Received(NamedTuple):
    """One span as it came over the wire. Ids are hex; `parent_id` "" at a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    kind: str
    """SERVER, CLIENT, CONSUMER, …"""
    is_error: bool


class Collector:
    """Use as a context. `hold`: requests are read, and answered once it is set. `status`: what they are answered with."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.num_requests = 0
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.num_requests += 1
                collector.hold.wait()
                if collector.status == 200:
                    collector.take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                with contextlib.suppress(ConnectionError):  # it gave up waiting
                    self.end_headers()
                    self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Nothing on the screen."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        threading.Thread(target=self._server.serve_forever, name="collector", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.hold.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            names = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
                    ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                    kind = (span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"), span.status.code == span.status.STATUS_CODE_ERROR)
                    times = (span.start_time_unix_nano, span.end_time_unix_nano)
                    self.spans.append(Received(*ids, span.name, names["service.name"], *times, values, *kind))

    def of(self, trace_id: str) -> list[Received]:
        """The spans of one trace, by their beginning."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)
