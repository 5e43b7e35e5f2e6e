"""A collector gets what was recorded; one that is gone costs nobody anything."""

import asyncio
import base64
import gzip
import http.server
import os
import threading
from collections.abc import Iterator

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from shared.config import ServiceConfig
from shared.errors import EnvironmentFault
from shared.telemetry.otlp import OtlpSink
from shared.telemetry.setup import open_telemetry
from shared.telemetry.telemetry import Span


class Collector(http.server.HTTPServer):
    """Keeps the bodies that were posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.answers: list[int] = []
        """Status codes to give first; 200 then."""


class CollectorHandler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()} | {"path": self.path})
        self.send_response(self.server.answers.pop(0) if self.server.answers else 200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


async def test_spans_reach_a_collector(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    telemetry = open_telemetry(ServiceConfig(name="decode-0"), "decode", "12345678", "1.2.3", os.environ)
    root = telemetry.mint_traceparent()
    telemetry.span("decode steps", traceparent=root, start_ns=telemetry.now_ns(), end_ns=telemetry.now_ns(), num_tokens=7)
    await telemetry.close()
    sent = b"".join(collector.bodies)
    assert b"decode steps" in sent
    assert bytes.fromhex(root.split("-")[1]) in sent
    assert b"12345678" in sent


async def test_a_dead_collector_neither_fails_nor_delays_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    telemetry = open_telemetry(ServiceConfig(name="decode-0"), "decode", "12345678", "1.2.3", os.environ)
    telemetry.span("x", traceparent=telemetry.mint_traceparent(), start_ns=1, end_ns=2)
    async with asyncio.timeout(10):  # an exporter that waits for its own retries takes 30 s
        await telemetry.close()


SPAN = Span(
    "a" * 32,
    "b" * 16,
    "c" * 16,
    "decode generate",
    10,
    20,
    {"text": "é", "flag": True, "number": 3, "share": 0.5, "many": ["x", "y"], "error.type": "worker_lost"},
)


def sink(**environ: str) -> OtlpSink:
    return OtlpSink("decode-0", "12345678", "decode", "1.2.3", environ)


def test_every_field_arrives_as_it_is() -> None:
    told = sink(OTEL_EXPORTER_OTLP_ENDPOINT="http://x", OTEL_RESOURCE_ATTRIBUTES="region=eu%20west,bad,service.name=mine").encode(
        [SPAN, SPAN]
    )
    [resource] = ExportTraceServiceRequest.FromString(told).resource_spans
    about = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert about["region"] == "eu west" and about["service.name"] == "decode" and about["service.instance.id"] == "12345678"
    [scope] = resource.scope_spans
    assert scope.scope.name == "slipstream" and len(scope.spans) == 2
    span = scope.spans[0]
    assert (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()) == SPAN[:3]
    assert (span.name, span.start_time_unix_nano, span.end_time_unix_nano) == ("decode generate", 10, 20)
    assert span.kind == span.SPAN_KIND_CONSUMER and span.status.code == span.status.STATUS_CODE_ERROR
    values = {pair.key: pair.value for pair in span.attributes}
    assert values["text"].string_value == "é" and values["number"].int_value == 3 and values["share"].double_value == 0.5
    assert values["flag"].WhichOneof("value") == "bool_value" and values["flag"].bool_value
    assert [one.string_value for one in values["many"].array_value.values] == ["x", "y"]


def test_an_empty_list_is_a_list() -> None:
    """As the finish reasons of a call that was left before it had any."""
    told = sink(OTEL_EXPORTER_OTLP_ENDPOINT="http://x").encode([SPAN._replace(attributes={"gen_ai.response.finish_reasons": []})])
    [span] = ExportTraceServiceRequest.FromString(told).resource_spans[0].scope_spans[0].spans
    [pair] = span.attributes
    assert pair.value.WhichOneof("value") == "array_value" and not pair.value.array_value.values


def test_a_root_has_no_parent() -> None:
    told = sink(OTEL_EXPORTER_OTLP_ENDPOINT="http://x").encode([SPAN._replace(parent_id="", name="chat m", attributes={})])
    [span] = ExportTraceServiceRequest.FromString(told).resource_spans[0].scope_spans[0].spans
    assert span.parent_span_id == b"" and span.kind == span.SPAN_KIND_SERVER and span.status.code == span.status.STATUS_CODE_UNSET


def test_headers_login_and_compression_are_as_the_variables_say(collector: Collector) -> None:
    host = f"127.0.0.1:{collector.server_port}"
    sink(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://bob:hunter%202@{host}/",
        OTEL_EXPORTER_OTLP_HEADERS="x-key=wrong",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="X-Key=a%20b,x-other=c",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
    ).write([SPAN])
    [headers] = collector.headers
    assert (headers["path"], headers["content-type"], headers["x-key"]) == ("/v1/traces", "application/x-protobuf", "a b")
    assert headers["authorization"] == "Basic " + base64.b64encode(b"bob:hunter 2").decode() and headers["x-other"] == "c"
    assert headers["content-encoding"] == "gzip"
    assert ExportTraceServiceRequest.FromString(gzip.decompress(collector.bodies[0])).resource_spans


def test_the_endpoint_for_traces_is_taken_whole(collector: Collector) -> None:
    own = f"http://127.0.0.1:{collector.server_port}/mine"
    sink(OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=own).write([SPAN])
    assert collector.headers[0]["path"] == "/mine"


def test_a_collector_that_is_busy_is_asked_again_and_one_that_refuses_is_not(collector: Collector) -> None:
    asked = sink(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{collector.server_port}")
    collector.answers = [503, 429]
    asked.write([SPAN])
    assert len(collector.bodies) == 3
    collector.answers = [400]
    with pytest.raises(OSError, match="answers HTTP 400"):
        asked.write([SPAN])
    assert len(collector.bodies) == 4


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://127.0.0.1:4317", "http://", "http://[::1"])
def test_an_endpoint_that_is_none_is_a_fault_at_the_start_that_names_the_variable(endpoint: str) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    with pytest.raises(EnvironmentFault) as caught:
        open_telemetry(ServiceConfig(name="decode-0"), "decode", "12345678", "1.2.3", environ)
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in caught.value.remedy


def test_certificates_that_cannot_be_read_are_a_fault_at_the_start() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318", "OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere.pem"}
    with pytest.raises(EnvironmentFault, match="no collector can be used"):
        open_telemetry(ServiceConfig(name="decode-0"), "decode", "12345678", "1.2.3", environ)
