"""/metrics over HTTP, from threads of its own: it answers while the event loop is busy."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from shared.telemetry.clock import ASKED_AT, ClockCheck

log = logging.getLogger(__name__)

OPENMETRICS = "application/openmetrics-text"


class MetricsServer:
    """Serves `registry` as text, or as OpenMetrics (which has exemplars) to whoever takes that. OSError if the port is taken."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        clock = ClockCheck()

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                if self.path.split("?")[0] != "/metrics":
                    self.send_error(404, "only /metrics is served here")
                    return
                clock.asked(self.headers.get(ASKED_AT, ""), self.client_address[0])
                content_type, body = expose(registry, self.headers.get("accept", ""))
                with suppress(ConnectionError):  # a scraper that hangs up is no fault of ours
                    self.send_response(200)
                    self.send_header("content-type", content_type)
                    self.send_header("content-length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Scrapes are not worth a line."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                log.info("a scrape from %s broke off: %s", client_address, sys.exc_info()[1])

        self._server = Server((host, port), Handler)
        self._server.daemon_threads = True
        Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def begin_close(self) -> Thread:
        """Ends the serving; join the thread."""
        closer = Thread(target=self._server.shutdown, name="metrics-close", daemon=True)
        closer.start()
        return closer

    def end_close(self) -> None:
        self._server.server_close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)


def expose(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """(content type, body)."""
    if OPENMETRICS not in accept:
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)
    # The default escaping of prometheus_client writes `vllm:x` as `vllm_x` in samples with labels. Our names need none.
    body: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return f"{OPENMETRICS}; version=1.0.0; charset=utf-8", body
