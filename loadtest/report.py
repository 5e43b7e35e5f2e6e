"""What a load run measured: rates and percentiles."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtest.client import Outcome

QUANTILES = (0.5, 0.9, 0.99)


class Spread(msgspec.Struct, frozen=True):
    """A distribution in short. All 0 where nothing was measured (`num` 0)."""

    num: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    largest: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Milliseconds and per second."""

    num_requests: int
    num_ok: int
    errors: dict[str, int]
    """Status and message → how often."""
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    goodput: float
    """Share of all requests that ended well within both targets; 1 where no target was given and all ended well."""


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """Nearest rank: the smallest value that at least `quantile` of the values do not exceed. `ordered` ascends and is not empty."""
    return ordered[max(math.ceil(quantile * len(ordered)) - 1, 0)]


def spread(values: Sequence[float]) -> Spread:
    """The distribution of `values`."""
    if not values:
        return Spread()
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, quantile) for quantile in QUANTILES)
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def summarise(outcomes: Sequence[Outcome], *, ttft_ms: float = math.inf, itl_ms: float = math.inf) -> Report:
    """One report of a run; `ttft_ms` and `itl_ms` (a request's mean) are the targets that goodput counts."""
    good = [outcome for outcome in outcomes if outcome.is_ok and outcome.token_times_ns]
    errors = Counter(f"{outcome.status} {outcome.error}".strip() for outcome in outcomes if not outcome.is_ok)
    duration_s = (max(o.ended_ns for o in outcomes) - min(o.started_ns for o in outcomes)) / 1e9 if outcomes else 0.0
    in_time = sum(outcome.ttft_ms <= ttft_ms and spread(outcome.gaps_ms).mean <= itl_ms for outcome in good)
    return Report(
        num_requests=len(outcomes),
        num_ok=sum(outcome.is_ok for outcome in outcomes),
        errors=dict(errors),
        duration_s=duration_s,
        requests_per_s=len(good) / duration_s if duration_s else 0.0,
        output_tokens_per_s=sum(outcome.num_tokens for outcome in good) / duration_s if duration_s else 0.0,
        ttft_ms=spread([outcome.ttft_ms for outcome in good]),
        itl_ms=spread([gap for outcome in good for gap in outcome.gaps_ms]),
        e2e_ms=spread([outcome.e2e_ms for outcome in good]),
        goodput=in_time / len(outcomes) if outcomes else 0.0,
    )


def as_text(report: Report) -> str:
    """For people."""
    lines = [
        f"requests    {report.num_ok} of {report.num_requests} ok in {report.duration_s:.1f} s · {report.requests_per_s:.1f}/s",
        f"output      {report.output_tokens_per_s:,.0f} tokens/s · goodput {report.goodput:.1%}",
    ]
    for name, values in (("ttft", report.ttft_ms), ("itl", report.itl_ms), ("e2e", report.e2e_ms)):
        lines.append(f"{name:<11} p50 {values.p50:.2f} · p90 {values.p90:.2f} · p99 {values.p99:.2f} · max {values.largest:.2f} ms")
    lines += [f"error       {count} x {what}" for what, count in report.errors.items()]
    return "\n".join(lines)
