"""What doctor says of processes that are dead, silent, or cannot come back."""

import json
import os
from pathlib import Path

import msgspec
import pytest

from services.console import process_findings as process_findings_module
from services.console.findings import Finding
from services.console.process_findings import LAST_LINES, last_complaint, process_findings, silent_findings
from services.console.run_folder import Run, process_start
from shared.bus.permissions import USERS
from shared.messages.fleet import WorkerLease

PID = os.getpid()
DEAD = 2**22 + 1


def stack(folder: Path, password_file: Path | None = None, pid: int = PID, **services: int) -> Run:
    return Run(
        folder=folder,
        pid=pid,
        pid_start=process_start(PID) or 0 if pid else 0,
        version="1",
        namespace="ss",
        nats_url="nats://nats:4222",
        nats_user="console" if password_file else "",
        nats_password_file=password_file,
        services=services,
    )


def line(message: str, level: str = "error", **more: str) -> str:
    return json.dumps({"time": "t", "level": level, "message": message, **more}) + "\n"


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    folder = tmp_path / "nats"
    folder.mkdir()
    for user in USERS:
        (folder / user).write_text("secret")
    return folder


def test_a_dead_process_is_told_with_its_own_last_words(tmp_path: Path) -> None:
    (tmp_path / "router.log").write_text(
        line("ready", "info") + line("/metrics cannot listen on 127.0.0.1:9: taken", code="environment", remedy="Set SS_METRICS_PORT")
    )
    [found] = process_findings(stack(tmp_path, router=DEAD, gateway=PID))
    assert found == Finding(
        "failed",
        "router has died and is not back yet: /metrics cannot listen on 127.0.0.1:9: taken",
        "Set SS_METRICS_PORT\nslipstream logs router",
    )


def test_one_that_waits_to_be_started_again_is_dead_meanwhile(tmp_path: Path) -> None:
    waiting = msgspec.structs.replace(stack(tmp_path, gateway=PID), away=["router"])
    assert [one.text for one in process_findings(waiting)] == ["router has died and is not back yet"]


def test_one_that_left_no_word_is_dead_all_the_same(tmp_path: Path) -> None:
    [found] = process_findings(stack(tmp_path, router=DEAD))
    assert (found.text, found.remedy) == ("router has died and is not back yet", "slipstream logs router")


def test_a_process_that_stands_still_is_named_with_why_if_it_said_so(tmp_path: Path) -> None:
    (tmp_path / "decode.log").write_text(line("cannot reach NATS", code="environment", remedy="start nats-server"))
    leases = [WorkerLease("0" * 8, "router", "router", "ready", 1, "1", 0)]
    [found] = silent_findings(stack(tmp_path, nats=PID, router=PID, decode=PID), leases)
    assert found.text.startswith(f"decode runs (pid {PID}), but its lease has expired") and found.text.endswith(": cannot reach NATS")
    assert "start nats-server" in found.remedy and f"kill {PID}" in found.remedy


@pytest.mark.parametrize(
    ("age_s", "state"), [(process_findings_module.STARTING_S - 1, "warning"), (process_findings_module.STARTING_S, "failed")]
)
def test_one_that_has_just_been_started_is_given_time(tmp_path: Path, age_s: float, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_findings_module, "process_age_s", lambda _: age_s)
    [found] = silent_findings(stack(tmp_path, decode=PID), [])
    assert found.state == state and found.remedy.startswith("slipstream logs decode")
    assert ("9 s ago" in found.text) == (state == "warning")


@pytest.mark.parametrize(
    "log",
    [
        "",
        "a library's words\n",
        line("a warning", "warning", code="environment"),
        line("no code"),
        line("long ago", code="environment") + line("ready", "info") * LAST_LINES,
    ],
)
def test_what_is_no_complaint_of_now(tmp_path: Path, log: str) -> None:
    (tmp_path / "x.log").write_text(log)
    assert last_complaint(tmp_path / "x.log") is None
    assert last_complaint(tmp_path / "absent.log") is None


def test_a_complaint_is_found_at_the_end_of_a_long_log(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text(line("x" * 100, "info") * 10_000 + line("the last", code="c") + "half a li")
    complaint = last_complaint(tmp_path / "x.log")
    assert complaint and complaint.message == "the last"


def test_passwords_that_are_there_are_no_finding(tmp_path: Path, passwords: Path) -> None:
    assert process_findings(stack(tmp_path, passwords / "console")) == []


def test_a_password_that_is_gone_is_found_before_its_user_is_started_again(tmp_path: Path, passwords: Path) -> None:
    (passwords / "router").unlink()
    [found] = process_findings(stack(tmp_path, passwords / "console", router=PID))
    assert found.state == "failed" and "router" in found.text and str(passwords) in found.text
    assert "slipstream down" in found.remedy


def test_of_a_stack_elsewhere_nothing_is_claimed(tmp_path: Path) -> None:
    elsewhere = stack(tmp_path, tmp_path / "password", pid=0)
    assert process_findings(elsewhere) == []
    assert elsewhere.title == "nats://nats:4222"
