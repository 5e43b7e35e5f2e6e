"""The table of instruments keeps its own rules."""

import re

import pytest

from shared.telemetry.metrics import INSTRUMENTS, Instrument, sections_of

ROWS = list(INSTRUMENTS.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_well_formed(row: Instrument) -> None:
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", row.exposed_name)
    assert row.help.endswith(".")
    assert not row.name.endswith("_total"), "counters get it on /metrics"
    assert bool(row.buckets) == (row.kind == "histogram")
    assert list(row.buckets) == sorted(set(row.buckets))
    assert all(re.fullmatch(r"[a-z_]+", label) for label in row.labels)


def test_no_two_rows_meet_on_the_metrics_page() -> None:
    assert len({row.exposed_name for row in ROWS}) == len(ROWS)


def test_only_foreign_names_go_without_the_prefix() -> None:
    assert Instrument("router_refused", "counter", "x.").exposed_name == "slipstream_router_refused"
    assert Instrument("vllm:prompt_tokens", "counter", "x.").exposed_name == "vllm:prompt_tokens"
    assert Instrument("gen_ai_server_request_duration_seconds", "histogram", "x.").exposed_name.startswith("gen_ai_")


def test_every_role_has_the_process_rows() -> None:
    for role in ("gateway", "router", "prefill", "decode", "kvstore", "planner"):
        assert INSTRUMENTS["service_info"] in sections_of(role)
