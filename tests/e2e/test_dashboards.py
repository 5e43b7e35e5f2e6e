"""Every panel's query, asked of a real Prometheus that scrapes a running stack under load. Part of `make soak`: it needs the programs
`prometheus` and `promtool` (Debian: apt-get install prometheus) on the PATH, or $PROMETHEUS: the first's path, with the other beside it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from loadtest.client import Client
from loadtest.local_stack import LocalStack
from services.console.preflight import free_port
from services.console.trace import find_trace, is_call
from shared.telemetry.metrics import INSTRUMENTS
from tests.support.stack import SIM, checked_stack, status_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

INFRA = Path(__file__).resolve().parents[2] / "infra"
LOAD_S = 75.0
"""Rates look back a minute."""
METRIC = re.compile(r"(?:slipstream_|vllm:|process_)\w+")
QUIET = re.compile(r"slipstream_(?!requests|router_routed|router_miss|kvclient_loaded|decode_ended|http_errors)\w+_total")
"""Counters by cause of which nothing may have happened yet. The others must be there under any load."""


class Prometheus(NamedTuple):
    url: str
    folder: Path
    """Of the run that it scrapes."""

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
            answer = json.load(response)
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def ask(self, query: str) -> list[str]:
        """The values of the series that there are."""
        return [series["value"][1] for series in self.get("query", query=query)["result"]]


def program(name: str) -> str:
    given = os.environ.get("PROMETHEUS")
    found = str(Path(given).with_name(name)) if given else shutil.which(name)
    assert found and Path(found).exists(), f"no program `{name}`: apt-get install prometheus, or set PROMETHEUS"
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("dashboards")
    flags = (*SIM, "--decode", "2", "--kv-ssd", f"{folder}/ssd:64M", "--sim-profile", "a=0,b=0.01,c=0.0,d=2")
    with checked_stack(folder, *flags, environ={"SS_DISAGGREGATION": "always"}) as stack:
        yield stack


@pytest.fixture
def prometheus(stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Prometheus]:
    """It has scraped the stack under load for as long as rates look back."""
    targets = status_of(stack, capsys)["services"]
    jobs = [{"job_name": target["name"], "static_configs": [{"targets": [target["metrics_address"]]}]} for target in targets]
    (tmp_path / "prometheus.yml").write_text(json.dumps({"global": {"scrape_interval": "2s"}, "scrape_configs": jobs}))  # JSON is YAML
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    flags = ("--config.file={0}/prometheus.yml", "--storage.tsdb.path={0}/data", "--enable-feature=exemplar-storage")
    command = [program("prometheus"), *(flag.format(tmp_path) for flag in flags), f"--web.listen-address={address}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        asyncio.run(load(stack, LOAD_S))
        yield Prometheus(f"http://{address}", Path(stack.describe()["folder"]))
    finally:
        process.terminate()
        process.wait()


async def load(stack: LocalStack, seconds: float) -> None:
    client = Client(stack.url)
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        number += 1
        prompt = f"Number {number}. " * 300
        bodies = [{"model": "smollm2-135m", "prompt": prompt + str(one), "max_tokens": 20, "stream": True} for one in range(3)]
        outcomes = await asyncio.gather(*(client.generate("/v1/completions", body) for body in bodies))
        assert [outcome.error for outcome in outcomes if not outcome.is_ok] == []
        await client.generate("/v1/completions", {"model": "nobody", "prompt": "x"})
    await client.close()


def test_every_panel_shows_data_under_load_and_exemplars_lead_to_traces(prometheus: Prometheus) -> None:
    panels = [
        (f"{file.stem}: {panel['title']}", [target["expr"] for target in panel["targets"]])
        for file in sorted((INFRA / "grafana" / "dashboards").glob("*.json"))
        for panel in json.loads(file.read_text())["panels"]
    ]
    assert len(panels) > 30
    empty = []
    for title, queries in panels:
        answers = [prometheus.ask(query) for query in queries]
        if not all(answers) or all(value == "NaN" for answer in answers for value in answer):
            empty.append(title)
    assert not empty

    asked = {name for _, queries in panels for query in queries for name in METRIC.findall(query)}
    labelled = {f"{row.exposed_name}_total" for row in INSTRUMENTS.values() if row.kind == "counter" and row.labels}
    may_be_absent = {name for name in labelled if QUIET.fullmatch(name)}
    assert [name for name in sorted(asked - may_be_absent) if not prometheus.ask(f"count({name})")] == [], "behind `or on() vector(0)`"

    now_s = time.time()
    found = prometheus.get("query_exemplars", query="vllm:e2e_request_latency_seconds_bucket", start=str(now_s - 60), end=str(now_s))
    trace_ids = [exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]]
    assert trace_ids
    assert any(is_call(span) for span in find_trace(prometheus.folder / "traces", trace_ids[-1]))


def test_prometheus_takes_the_configuration_of_the_containers() -> None:
    file = INFRA / "prometheus" / "prometheus.yml"
    done = subprocess.run([program("promtool"), "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
