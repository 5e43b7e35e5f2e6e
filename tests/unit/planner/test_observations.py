"""Numbers out of events: simple enough to be counted by hand."""

import pytest

from services.planner.observations import Observations, itl_ms
from tests.support.events import make_load, make_route, make_usage
from tests.support.leases import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def observations(clock: Clock) -> Observations:
    return Observations(clock, 60.0, slo_ttft_ms=200.0, slo_itl_ms=50.0)


def test_nothing_seen_is_no_division_by_zero(observations: Observations) -> None:
    summary = observations.summary()
    assert summary["requests_per_s"] == 0
    assert "ttft_attainment" not in summary, "nothing was measured, so nothing is claimed"
    assert summary["decode_waiting"] == 0


def test_rates(observations: Observations, clock: Clock) -> None:
    for number in range(4):
        observations.take_usage(make_usage(number))
    observations.take_usage(make_usage(9, outcome="worker_lost", num_migrations=3))
    clock.advance(10)
    summary = observations.summary()
    assert summary["requests_per_s"] == 0.5
    assert summary["errors_per_s"] == 0.1
    assert summary["migrations_per_s"] == 0.3
    assert summary["prompt_tokens_per_s"] == 50
    assert summary["output_tokens_per_s"] == 5.5
    assert summary["cached_ratio"] == 0.5


def test_attainment_counts_finished_requests_only(observations: Observations) -> None:
    observations.take_usage(make_usage(1, ttft_ms=100, e2e_ms=600))
    observations.take_usage(make_usage(2, ttft_ms=200, e2e_ms=1200))
    observations.take_usage(make_usage(3, ttft_ms=300, e2e_ms=400))
    observations.take_usage(make_usage(4, ttft_ms=9000, e2e_ms=9000, outcome="cancelled"))
    observations.take_usage(make_usage(5, ttft_ms=10, e2e_ms=10, num_output_tokens=1))
    summary = observations.summary()
    assert summary["ttft_attainment"] == 0.75
    assert summary["itl_attainment"] == pytest.approx(2 / 3), "one token has no interval"
    assert summary["ttft_ms_p50"] == 200
    assert summary["ttft_ms_p99"] == 300
    assert summary["errors_per_s"] == 0


def test_itl_is_the_mean_after_the_first_token() -> None:
    assert itl_ms(make_usage(ttft_ms=100, e2e_ms=600, num_output_tokens=11)) == 50
    assert itl_ms(make_usage(ttft_ms=100, e2e_ms=90, num_output_tokens=2)) == 0


def test_a_record_that_comes_twice_counts_once(observations: Observations, clock: Clock) -> None:
    observations.take_usage(make_usage(1))
    observations.take_usage(make_usage(1))
    clock.advance(1)
    assert observations.summary()["requests_per_s"] == 1


def test_routes(observations: Observations, clock: Clock) -> None:
    observations.take_route(make_route(1))
    observations.take_route(make_route(2, num_uncached_tokens=0, prefill_worker="bbbbbbbb"))
    clock.advance(2)
    summary = observations.summary()
    assert summary["routes_per_s"] == 1
    assert summary["uncached_tokens_per_s"] == 20
    assert summary["uncached_ratio"] == 0.2
    assert summary["prefilled_ratio"] == 0.5


def test_gaps_between_routes_are_counted_for_each_router(observations: Observations) -> None:
    observations.take_route(make_route(5))
    observations.take_route(make_route(6))
    observations.take_route(make_route(9))
    observations.take_route(make_route(1, router="eeeeeeee"))
    observations.take_route(make_route(3, router="eeeeeeee"))
    assert observations.num_missed_routes == 3


def test_the_newest_load_of_each_worker_counts(observations: Observations) -> None:
    observations.take_load(make_load(sequence=2, num_running=5))
    observations.take_load(make_load(sequence=1, num_running=9))
    observations.take_load(make_load("bbbbbbbb", num_running=1, num_used_blocks=40, utilisation=0.5))
    observations.take_load(make_load("cccccccc", role="prefill", num_queued_tokens=700))
    summary = observations.summary()
    assert summary["decode_running"] == 6
    assert summary["decode_used_blocks_ratio"] == 0.5
    assert summary["decode_utilisation"] == 0.25
    assert summary["prefill_queued_tokens"] == 700
    observations.forget("bbbbbbbb")
    assert observations.summary()["decode_running"] == 5


def test_old_events_are_forgotten(observations: Observations, clock: Clock) -> None:
    observations.take_usage(make_usage())
    observations.take_route(make_route())
    clock.advance(61)
    summary = observations.summary()
    assert (summary["requests_per_s"], summary["routes_per_s"]) == (0, 0)
