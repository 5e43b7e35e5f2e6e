import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest

from services.console.bus_look import clock_offset_s, look_at_bus
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects

NOW_S = 1_800_000_000.75
SKEW_S = 3600.0
SUBJECTS = Subjects("ss")
ROUTER = WorkerLease("aaaa0000", "router", "router", "ready", 1, "0", 0)
STREAM: dict[str, Any] = {
    "config": {"name": "SS_DECODE", "retention": "workqueue", "storage": "memory", "discard": "new", "max_bytes": 100, "max_msgs": 10},
    "state": {"messages": 2, "bytes": 7, "last_ts": "2026-01-01T00:00:00.5Z", "first_seq": 1},
    "ts": "2026-01-01T00:00:01.123456789Z",
    "cluster": {"leader": "n"},
}


class AnHourAhead(BaseHTTPRequestHandler):
    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(NOW_S + SKEW_S)

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), AnHourAhead)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_clock_is_read_from_the_date_of_a_refusal(address: str) -> None:
    assert clock_offset_s(address, lambda: NOW_S) == pytest.approx(SKEW_S, abs=0.5)


def test_a_silent_process_has_no_clock() -> None:
    assert clock_offset_s("127.0.0.1:1") is None


async def test_streams_with_what_waits_for_each_worker_and_the_routers_index() -> None:
    broker = MemoryBroker()
    nats, bus = MemoryBus(broker), MemoryBus(broker)

    async def listed(_: Message) -> bytes:
        return json.dumps({"total": 1, "streams": [STREAM]}).encode()

    async def detailed(_: Message) -> bytes:
        state = {**STREAM["state"], "subjects": {"ss.v1.decode.bbbb0000": 2}}
        return json.dumps({**STREAM, "state": state}).encode()

    async def index(_: Message) -> bytes:
        return b'{"bbbb0000":{"dram":4}}'

    await nats.serve("$JS.API.STREAM.LIST", listed)
    await nats.serve("$JS.API.STREAM.INFO.SS_DECODE", detailed)
    await nats.serve(SUBJECTS.router(ROUTER.instance, "index"), index)
    look = await look_at_bus(bus, SUBJECTS, [ROUTER])
    assert look.streams is not None
    assert look.streams["SS_DECODE"].state.subjects == {"ss.v1.decode.bbbb0000": 2}
    assert look.indexes == {"router": {"bbbb0000": {"dram": 4}}}
    assert look.clocks_s["NATS"] < 0, "it lives in the past"
    await bus.close()
    await nats.close()


async def test_who_does_not_tell_is_none() -> None:
    bus = MemoryBus(MemoryBroker())
    look = await look_at_bus(bus, SUBJECTS, [ROUTER])
    assert (look.streams, look.indexes, look.clocks_s) == (None, {"router": None}, {})
    await bus.close()
