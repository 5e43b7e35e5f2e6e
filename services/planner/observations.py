"""What the planner has seen of late, boiled down to a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from services.planner.window import Window
from shared.messages.fleet import Route, UsageRecord, WorkerLoad

FINISHED = frozenset({"stop", "length"})
"""Outcomes of a request whose text is complete."""
CANCELLED = "cancelled"


class Observations:
    """Takes events as they come; `summary` is pure arithmetic over what is still in the window."""

    def __init__(self, monotonic: Callable[[], float], window_s: float, slo_ttft_ms: float, slo_itl_ms: float) -> None:
        self._slo_ttft_ms = slo_ttft_ms
        self._slo_itl_ms = slo_itl_ms
        self._usage: Window[UsageRecord] = Window(monotonic, window_s)
        self._routes: Window[Route] = Window(monotonic, window_s)
        self._loads: dict[str, WorkerLoad] = {}
        self._route_sequences: dict[str, int] = {}
        self.num_missed_routes = 0
        """Routes that never came, by the gaps in their routers' sequences."""

    def take_load(self, load: WorkerLoad) -> None:
        """The newest one of each worker counts."""
        last = self._loads.get(load.worker)
        if last is None or load.sequence > last.sequence:
            self._loads[load.worker] = load

    def take_route(self, route: Route) -> None:
        last = self._route_sequences.get(route.router, route.sequence - 1)
        self.num_missed_routes += max(route.sequence - last - 1, 0)
        self._route_sequences[route.router] = route.sequence
        self._routes.add(route)

    def take_usage(self, record: UsageRecord) -> None:
        self._usage.add(record)

    def forget(self, instance: str) -> None:
        """A worker or router whose lease ended."""
        self._loads.pop(instance, None)
        self._route_sequences.pop(instance, None)

    def summary(self) -> dict[str, float]:
        """Rates a second, shares from 0 to 1, percentiles in ms. A number that has nothing to be computed from is left out."""
        # A record that was published twice (its first acknowledgement was lost) counts once.
        records = list({record.request_id: record for record in self._usage}.values())
        return {**self._demand(records), **self._latency(records), **self._routing(), **self._occupancy()}

    def _demand(self, records: Sequence[UsageRecord]) -> dict[str, float]:
        seconds = self._usage.covered_s
        num_prompt_tokens = sum(record.num_prompt_tokens for record in records)
        failed = [record for record in records if record.outcome not in FINISHED and record.outcome != CANCELLED]
        return {
            "requests_per_s": len(records) / seconds,
            "errors_per_s": len(failed) / seconds,
            "migrations_per_s": sum(record.num_migrations for record in records) / seconds,
            "prompt_tokens_per_s": num_prompt_tokens / seconds,
            "output_tokens_per_s": sum(record.num_output_tokens for record in records) / seconds,
            **_share("cached_ratio", sum(record.num_cached_tokens for record in records), num_prompt_tokens),
        }

    def _latency(self, records: Sequence[UsageRecord]) -> dict[str, float]:
        """Of requests whose text is complete: others say nothing about speed."""
        finished = [record for record in records if record.outcome in FINISHED]
        ttfts_ms = [record.ttft_ms for record in finished]
        itls_ms = [itl_ms(record) for record in finished if record.num_output_tokens > 1]
        return {
            **_percentiles("ttft_ms", ttfts_ms),
            **_percentiles("itl_ms", itls_ms),
            **_share("ttft_attainment", sum(value <= self._slo_ttft_ms for value in ttfts_ms), len(ttfts_ms)),
            **_share("itl_attainment", sum(value <= self._slo_itl_ms for value in itls_ms), len(itls_ms)),
        }

    def _routing(self) -> dict[str, float]:
        routes = list(self._routes)
        num_tokens = sum(route.num_tokens for route in routes)
        return {
            "routes_per_s": len(routes) / self._routes.covered_s,
            "uncached_tokens_per_s": sum(route.num_uncached_tokens for route in routes) / self._routes.covered_s,
            **_share("uncached_ratio", sum(route.num_uncached_tokens for route in routes), num_tokens),
            **_share("prefilled_ratio", sum(route.prefill_worker is not None for route in routes), len(routes)),
        }

    def _occupancy(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        for role in ("prefill", "decode"):
            loads = [load for load in self._loads.values() if load.role == role]
            numbers[f"{role}_running"] = sum(load.num_running for load in loads)
            numbers[f"{role}_waiting"] = sum(load.num_waiting for load in loads)
            numbers[f"{role}_queued_tokens"] = sum(load.num_queued_tokens for load in loads)
            numbers |= _share(
                f"{role}_used_blocks_ratio", sum(load.num_used_blocks for load in loads), sum(load.num_blocks for load in loads)
            )
            numbers |= _share(f"{role}_utilisation", sum(load.utilisation for load in loads), len(loads))
        return numbers


def itl_ms(record: UsageRecord) -> float:
    """Mean time between tokens after the first. For more than one output token."""
    return max(record.e2e_ms - record.ttft_ms, 0.0) / (record.num_output_tokens - 1)


def _share(name: str, part: float, whole: float) -> dict[str, float]:
    return {name: part / whole} if whole else {}


def _percentiles(name: str, values: Iterable[float]) -> dict[str, float]:
    ranked = sorted(values)
    if not ranked:
        return {}
    return {f"{name}_p50": ranked[len(ranked) // 2], f"{name}_p99": ranked[min(len(ranked) * 99 // 100, len(ranked) - 1)]}
