"""A collector gets what was recorded; one that is gone costs nobody anything."""

import asyncio
import http.server
import os
import threading
from collections.abc import Iterator

import pytest

from shared.config import ServiceConfig
from shared.telemetry.setup import open_telemetry


class Collector(http.server.HTTPServer):
    """Keeps the bodies that were posted to it."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), CollectorHandler)
        self.bodies: list[bytes] = []


class CollectorHandler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
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
