"""Reading the /metrics of another process: for commands that show numbers, and for tests."""

from __future__ import annotations

import time
import urllib.request
from collections import defaultdict
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from shared.telemetry.clock import ASKED_AT

TIMEOUT_S = 2.0


class Series(NamedTuple):
    """One line of a page."""

    name: str
    labels: dict[str, str]
    value: float


class Page:
    """What one or more processes say of themselves. Names as on /metrics."""

    def __init__(self, series: list[Series]) -> None:
        self._by_name: defaultdict[str, list[Series]] = defaultdict(list)
        for one in series:
            self._by_name[one.name].append(one)

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series that have `labels`; 0 if there are none."""
        return sum(one.value for one in self._by_name[name] if labels.items() <= one.labels.items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The sums by the values of a label, over the series that have `labels`."""
        sums: defaultdict[str, float] = defaultdict(float)
        for one in self._by_name[name]:
            if labels.items() <= one.labels.items():
                sums[one.labels.get(label, "")] += one.value
        return dict(sums)

    def buckets(self, histogram: str) -> dict[float, float]:
        """Upper bound → how many were at most that, over all label sets."""
        return {float(bound): count for bound, count in self.by(f"{histogram}_bucket", "le").items()}


def read_page(address: str) -> Page:
    """The page at host:port. Raises OSError."""
    request = urllib.request.Request(f"http://{address}/metrics", headers={ASKED_AT: repr(time.time())})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return parse_page(response.read().decode())


def parse_page(text: str) -> Page:
    families = text_string_to_metric_families(text)
    return Page([Series(sample.name, sample.labels, sample.value) for family in families for sample in family.samples])


def merged(pages: list[Page]) -> Page:
    """Several processes as one."""
    return Page([one for page in pages for series in page._by_name.values() for one in series])


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float | None:
    """Of what came between two looks at `buckets`, by linear interpolation; None if nothing came."""
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    total = max(counts.values(), default=0.0)
    if total <= 0:
        return None
    last_bound = last_count = 0.0
    for bound, count in counts.items():
        if count >= q * total:
            if bound == float("inf") or count == last_count:
                return last_bound
            return last_bound + (bound - last_bound) * (q * total - last_count) / (count - last_count)
        last_bound, last_count = bound, count
    return last_bound
