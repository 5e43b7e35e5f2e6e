"""Every panel's query, asked of a real Prometheus that scrapes a running stack under load. Part of `make soak`: it needs the program
`prometheus` (Debian: apt-get install prometheus) on the PATH, or named by $PROMETHEUS."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client
from loadtest.local_stack import LocalStack
from services.console.preflight import free_port
from tests.support.stack import SIM, checked_stack, status_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

DASHBOARDS = Path(__file__).resolve().parents[2] / "infra" / "grafana" / "dashboards"
LOAD_S = 75.0
"""Rates look back a minute."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    folder = tmp_path_factory.mktemp("dashboards")
    flags = (*SIM, "--decode", "2", "--kv-ssd", f"{folder}/ssd:64M", "--sim-profile", "a=0,b=0.01,c=0.0,d=2")
    with checked_stack(folder, *flags, environ={"SS_DISAGGREGATION": "always"}) as stack:
        yield stack


def prometheus_of(stack: LocalStack, folder: Path, targets: list[dict[str, Any]]) -> tuple[subprocess.Popen[bytes], str]:
    program = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    assert program, "no program `prometheus`: apt-get install prometheus, or set PROMETHEUS"
    config = {
        "global": {"scrape_interval": "2s"},
        "scrape_configs": [
            {"job_name": target["name"], "static_configs": [{"targets": [target["metrics_address"]]}]} for target in targets
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), f"http://{address}"


def ask(url: str, query: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=10) as response:
        answer = json.load(response)
    assert answer["status"] == "success", (query, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


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


def test_every_panel_shows_data_under_load(stack: LocalStack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prometheus, url = prometheus_of(stack, tmp_path, status_of(stack, capsys)["services"])
    try:
        asyncio.run(load(stack, LOAD_S))
        empty, num_panels = [], 0
        for file in sorted(DASHBOARDS.glob("*.json")):
            for panel in json.loads(file.read_text())["panels"]:
                num_panels += 1
                results = [ask(url, target["expr"]) for target in panel["targets"]]
                values = [series["value"][1] for result in results for series in result]
                if not all(results) or all(value == "NaN" for value in values):
                    empty.append(f"{file.stem}: {panel['title']}")
        assert num_panels > 30
        assert not empty, ", ".join(empty)
    finally:
        prometheus.terminate()
        prometheus.wait()
