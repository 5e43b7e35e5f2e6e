from pathlib import Path
from typing import Any

import pytest

from services.console import port_findings as module
from services.console.port_findings import port_findings
from services.console.run_folder import Run

GATEWAY = "pid 7 (python -P -m services.gateway)"
SERVER = "pid 8 (/usr/bin/nats-server --config x)"
OTHER = "pid 9 (python -m http.server)"


def make(**fields: Any) -> Run:
    defaults = {"state": "ready", "nats_user": "console", "nats_url": "nats://127.0.0.1:4301", "http_url": "http://127.0.0.1:8301"}
    return Run(folder=Path("run-1"), pid=1, pid_start=1, version="1", namespace="ss", **{**defaults, **fields})


def hold(monkeypatch: pytest.MonkeyPatch, holders: dict[int, str]) -> None:
    monkeypatch.setattr(module, "port_holder", lambda port: holders.get(port, ""))


def test_a_stack_at_other_ports_is_looked_for_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, {8301: GATEWAY, 4301: SERVER, 8000: OTHER, 4222: OTHER})
    found = port_findings([make()])
    assert [one.state for one in found] == ["done", "done"], "who holds the defaults is of no matter"
    assert ["8301" in found[0].text, "4301" in found[1].text] == [True, True]


@pytest.mark.parametrize(("holder", "state"), [("", "warning"), (OTHER, "failed")])
def test_a_port_that_the_stack_has_lost(holder: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, {8301: holder, 4301: SERVER})
    lost, sound = port_findings([make()])
    assert (lost.state, sound.state) == (state, "done")
    assert holder in lost.text and lost.remedy


def test_without_a_stack_that_is_ready_the_defaults_count(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, {8000: OTHER})
    for runs in ([], [make(state="starting")]):
        taken, free = port_findings(runs)
        assert (taken.state, free.state) == ("warning", "done")
        assert OTHER in taken.text and taken.remedy == "slipstream up --port 8001"


def test_ports_that_are_not_of_the_run_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, {8301: GATEWAY, 4301: SERVER})
    assert len(port_findings([make(nats_user="")])) == 1, "a NATS that was there already"
    assert port_findings([make(joined=True, http_url="")]) == []
    assert len(port_findings([make(), make(joined=True, http_url="")])) == 2
