"""The dashboards are what their program writes, and ask only for what there is."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from shared.telemetry.metrics import INSTRUMENTS

GRAFANA = Path(__file__).resolve().parents[3] / "infra" / "grafana"
METRIC = re.compile(r"(?:slipstream_|vllm:|process_)\w+")


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_dashboards", GRAFANA / "make_dashboards.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_program_writes(program: ModuleType) -> None:
    assert {path.name: path.read_text() for path in (GRAFANA / "dashboards").glob("*.json")} == program.render()


def test_every_query_asks_for_a_metric_that_some_service_has(program: ModuleType) -> None:
    known = {"process_resident_memory_bytes"}
    for instrument in INSTRUMENTS.values():
        suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[instrument.kind]
        known.add(instrument.exposed_name + suffix)
        if instrument.kind == "histogram":
            known.add(instrument.exposed_name + "_count")
    asked = {
        name
        for _, panels in program.DASHBOARDS.values()
        for panel in panels
        for query, _ in panel.queries
        for name in METRIC.findall(query)
    }
    assert len(asked) > 40
    assert asked - known == set()


def test_labels_that_a_query_groups_by_are_the_metrics_own(program: ModuleType) -> None:
    by_name = {instrument.exposed_name: set(instrument.labels) for instrument in INSTRUMENTS.values()}
    for _, panels in program.DASHBOARDS.values():
        for panel in panels:
            for query, _ in panel.queries:
                [name, *_] = METRIC.findall(query)
                labels = by_name.get(re.sub(r"_(total|bucket|count)$", "", name), set()) | {"le", "instance", "job"}
                for group in re.findall(r"by \(([^)]*)\)", query):
                    assert {label.strip() for label in group.split(",")} <= labels, query


def test_bounds_that_a_query_names_are_the_histograms_own(program: ModuleType) -> None:
    by_name = {instrument.exposed_name: instrument.buckets for instrument in INSTRUMENTS.values()}
    named = [
        found
        for _, panels in program.DASHBOARDS.values()
        for panel in panels
        for query, _ in panel.queries
        for found in re.findall(r'([\w:]+)_bucket{le="([^"]*)"}', query)
    ]
    assert len(named) == 2
    assert [(name, bound) for name, bound in named if bound not in map(str, by_name[name])] == []
