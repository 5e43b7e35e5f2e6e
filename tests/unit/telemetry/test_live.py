"""/metrics as a scraper sees it."""

import http.client
import socket
import struct

import pytest

from shared.errors import EnvironmentFault
from shared.telemetry import propagation
from shared.telemetry.live import MAX_LABEL_SETS, LiveTelemetry, reachable
from shared.telemetry.metrics import sections_of


def scrape(telemetry: LiveTelemetry, accept: str = "") -> str:
    connection = http.client.HTTPConnection(telemetry.address, timeout=5)
    try:
        connection.request("GET", "/metrics", headers={"Accept": accept})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


async def test_numbers_come_out_under_their_names() -> None:
    telemetry = LiveTelemetry(sections=sections_of("planner"))
    telemetry.serve("127.0.0.1", 0)
    telemetry.count("fleet_expired", 2, role="decode")
    telemetry.gauge("fleet_size", 3, role="decode")
    telemetry.observe("event_loop_lag_seconds", 0.15)
    lines = scrape(telemetry).splitlines()
    await telemetry.close()
    assert 'slipstream_fleet_expired_total{role="decode"} 2.0' in lines
    assert 'slipstream_fleet_size{role="decode"} 3.0' in lines
    assert 'slipstream_event_loop_lag_seconds_bucket{le="0.1"} 0.0' in lines
    assert 'slipstream_event_loop_lag_seconds_bucket{le="0.2"} 1.0' in lines
    assert "slipstream_leases_lost_total 0.0" in lines, "what never happened reads 0"
    assert any(line.startswith("process_resident_memory_bytes") for line in lines)
    assert not any("_created" in line for line in lines)


async def test_a_histogram_carries_the_trace_of_an_example() -> None:
    telemetry = LiveTelemetry()
    telemetry.serve("127.0.0.1", 0)
    context = propagation.new_trace()
    telemetry.observe("event_loop_lag_seconds", 0.15, exemplar=context.traceparent)
    telemetry.observe("event_loop_lag_seconds", 0.15, exemplar="rubbish")
    unsampled = propagation.new_trace(sample=0)
    telemetry.observe("event_loop_lag_seconds", 0.15, exemplar=unsampled.traceparent)
    page = scrape(telemetry, "application/openmetrics-text; version=1.0.0")
    await telemetry.close()
    assert f'trace_id="{context.trace_id}"' in page
    assert unsampled.trace_id not in page, "it leads nowhere"


def test_the_order_of_labels_does_not_matter() -> None:
    telemetry = LiveTelemetry()
    telemetry.gauge("service_info", 1, role="decode", name="decode-0", instance="00000000", version="1")
    telemetry.gauge("service_info", 2, version="1", instance="00000000", name="decode-0", role="decode")
    labels = {"role": "decode", "name": "decode-0", "instance": "00000000", "version": "1"}
    assert telemetry.registry.get_sample_value("slipstream_service_info", labels) == 2


def test_a_label_that_runs_wild_ends_as_other() -> None:
    telemetry = LiveTelemetry()
    for number in range(MAX_LABEL_SETS + 5):
        telemetry.count("lease_renewal_failures", reason=f"reason-{number}")
    assert telemetry.registry.get_sample_value("slipstream_lease_renewal_failures_total", {"reason": "other"}) == 5
    assert telemetry.registry.get_sample_value("slipstream_telemetry_label_overflow_total") == 5


async def test_a_taken_port_is_a_fault_with_a_remedy() -> None:
    first, second = LiveTelemetry(), LiveTelemetry()
    first.serve("127.0.0.1", 0)
    port = int(first.address.rpartition(":")[2])
    with pytest.raises(EnvironmentFault, match=f"127.0.0.1:{port}") as caught:
        second.serve("127.0.0.1", port)
    await first.close()
    assert "SS_METRICS_PORT" in caught.value.remedy


async def test_close_twice_is_close_once() -> None:
    telemetry = LiveTelemetry()
    telemetry.serve("127.0.0.1", 0)
    await telemetry.close()
    await telemetry.close()


async def test_names_with_a_colon_stay_as_they_are_whatever_the_scraper_takes() -> None:
    telemetry = LiveTelemetry()
    telemetry.serve("127.0.0.1", 0)
    telemetry.count("vllm:prompt_tokens", 3, model_name="m")
    telemetry.observe("vllm:time_to_first_token_seconds", 0.1, model_name="m")
    for accept in ("", "application/openmetrics-text; version=1.0.0", "application/openmetrics-text;version=1.0.0;escaping=underscores"):
        page = scrape(telemetry, accept)
        assert 'vllm:prompt_tokens_total{model_name="m"} 3.0' in page, accept
        assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 1' in page, accept
        assert "vllm_" not in page
    await telemetry.close()


async def test_a_scraper_that_hangs_up_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    telemetry = LiveTelemetry(sections=sections_of("router"))
    telemetry.serve("127.0.0.1", 0)
    host, _, port = telemetry.address.partition(":")
    for said in (b"GET /metrics HTTP/1.1\r\n\r\n", b"GET /met", b""):
        with socket.create_connection((host, int(port))) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(said)
    assert "slipstream_router_queued" in scrape(telemetry)
    await telemetry.close()
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("host", "told"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname()), ("::", socket.gethostname()), ("::1", "[::1]")]
)
def test_an_address_is_one_that_others_can_use(host: str, told: str) -> None:
    """A container listens on every interface; what its lease says must lead there from the next one."""
    assert reachable(host) == told
