"""What callers see of telemetry: names are checked, spans link up, nothing waits."""

import pytest

from shared.telemetry import NullTelemetry, Telemetry, propagation
from shared.telemetry.live import LiveTelemetry
from shared.telemetry.metrics import INSTRUMENTS


@pytest.fixture(params=[NullTelemetry, LiveTelemetry])
def telemetry(request: pytest.FixtureRequest) -> Telemetry:
    made: Telemetry = request.param()
    return made


def test_a_name_that_is_not_in_the_table_is_a_key_error(telemetry: Telemetry) -> None:
    with pytest.raises(KeyError, match="no_such_thing"):
        telemetry.count("no_such_thing")


def test_another_kind_or_other_labels_are_a_value_error(telemetry: Telemetry) -> None:
    with pytest.raises(ValueError, match="leases_lost is a counter"):
        telemetry.gauge("leases_lost", 1)
    with pytest.raises(ValueError, match="fleet_size"):
        telemetry.gauge("fleet_size", 1)
    with pytest.raises(ValueError, match="fleet_size"):
        telemetry.gauge("fleet_size", 1, role="decode", model="m")


def test_null_telemetry_keeps_what_it_is_told() -> None:
    telemetry = NullTelemetry()
    telemetry.count("fleet_expired", role="decode")
    telemetry.count("fleet_expired", 2, role="prefill")
    telemetry.gauge("fleet_size", 3, role="decode")
    telemetry.observe("event_loop_lag_seconds", 0.5)
    assert telemetry.counts[("fleet_expired", (("role", "decode"),))] == 1
    assert telemetry.total("fleet_expired") == 3
    assert telemetry.total("fleet_expired", role="prefill") == 2
    assert telemetry.gauges == {("fleet_size", (("role", "decode"),)): 3}
    assert telemetry.observations[("event_loop_lag_seconds", ())] == [0.5]


def test_stages_of_a_request_form_one_tree() -> None:
    telemetry = NullTelemetry()
    root = telemetry.mint_traceparent()
    route = telemetry.span("route", traceparent=root, start_ns=1, end_ns=2)
    telemetry.span("decode", traceparent=route, start_ns=2, end_ns=3, num_tokens=7)
    assert telemetry.span("request", traceparent="", minted=root, start_ns=0, end_ns=4) == root
    route_span, decode_span, root_span = telemetry.spans
    assert {span.trace_id for span in telemetry.spans} == {root_span.trace_id}
    assert (root_span.parent_id, route_span.parent_id, decode_span.parent_id) == ("", root_span.span_id, route_span.span_id)
    assert decode_span.attributes == {"num_tokens": 7}


def test_a_request_joins_the_trace_of_its_client() -> None:
    telemetry = NullTelemetry()
    client = propagation.new_trace()
    own = telemetry.mint_traceparent(client.traceparent)
    telemetry.span("request", traceparent=client.traceparent, minted=own, start_ns=0, end_ns=4)
    assert (telemetry.spans[0].trace_id, telemetry.spans[0].parent_id) == (client.trace_id, client.span_id)


def test_what_a_client_does_not_sample_is_handed_on_and_not_kept() -> None:
    telemetry = NullTelemetry()
    client = propagation.TraceContext("1" * 32, "2" * 16, False)
    child = telemetry.span("request", traceparent=client.traceparent, start_ns=0, end_ns=4)
    assert child.startswith(f"00-{client.trace_id}-")
    assert child.endswith("-00")
    assert telemetry.spans == []


@pytest.mark.parametrize("traceparent", ["", "rubbish"])
def test_without_a_traceparent_there_is_no_span(traceparent: str) -> None:
    telemetry = NullTelemetry()
    assert telemetry.span("x", traceparent=traceparent, start_ns=0, end_ns=1) == ""
    assert telemetry.spans == []


def test_the_table_holds_what_the_frame_itself_counts() -> None:
    assert {"service_info", "leases_lost", "telemetry_dropped", "event_loop_lag_seconds"} <= INSTRUMENTS.keys()
