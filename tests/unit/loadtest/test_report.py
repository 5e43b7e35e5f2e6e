import msgspec

from loadtest.client import Outcome
from loadtest.report import as_text, percentile, spread, summarise


def outcome(ttft_ms: float, gap_ms: float, num_tokens: int = 3, **fields: object) -> Outcome:
    times = [int((ttft_ms + gap_ms * index) * 1e6) for index in range(num_tokens)]
    return Outcome(status=200, started_ns=0, ended_ns=times[-1] if times else 0, token_times_ns=times, **fields)


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1)) == (50, 99, 100)
    assert percentile([3.0], 0.5) == 3
    assert spread([]).num == 0


def test_a_report_counts_what_failed_and_what_was_late() -> None:
    outcomes = [outcome(10, 5), outcome(100, 5), outcome(10, 50), Outcome(status=429, error="overloaded", ended_ns=1)]
    report = summarise(outcomes, ttft_ms=50, itl_ms=20)
    assert (report.num_requests, report.num_ok, report.errors) == (4, 3, {"429 overloaded": 1})
    assert report.goodput == 0.25
    assert report.ttft_ms.largest == 100
    assert report.itl_ms.num == 6
    assert "429 overloaded" in as_text(report)
    assert msgspec.json.decode(msgspec.json.encode(report))["goodput"] == 0.25


def test_nothing_measured_is_no_crash() -> None:
    assert summarise([]).num_requests == 0
