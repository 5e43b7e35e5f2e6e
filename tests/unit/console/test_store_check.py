"""What is said of the disk that NATS gets, before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.console import secrets
from services.console.store_check import NOTE, noted_findings, store_findings
from shared.bus.streams import stream_specs
from shared.errors import EnvironmentFault
from shared.messages.subjects import Subjects

SUBJECTS = Subjects("ss")


def put(store: Path, name: str, **changes: object) -> Path:
    """A stream as nats-server writes it down, with this version's rules but for `changes`."""
    [spec] = [spec for spec in stream_specs(SUBJECTS) if spec.name == name] or [stream_specs(SUBJECTS)[0]]
    config = {"name": name, "retention": spec.retention, "storage": spec.storage, "discard": spec.discard, "max_bytes": spec.max_bytes}
    path = store / "jetstream" / "APP" / "streams" / name / "meta.inf"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(config | changes))
    return path


def test_no_data_yet_and_sound_data_are_nothing_to_say(tmp_path: Path) -> None:
    assert store_findings(tmp_path / "absent", SUBJECTS) == []
    put(tmp_path, "SS_USAGE")
    put(tmp_path, "SOMEBODY_ELSES", retention="interest")
    assert store_findings(tmp_path, SUBJECTS) == []


def test_a_stream_of_an_older_version_fails_with_what_to_do(tmp_path: Path) -> None:
    put(tmp_path, "SS_DECODE", retention="limits", storage="file")
    [found] = store_findings(tmp_path, SUBJECTS)
    assert found.state == "failed" and "SS_DECODE is of another version" in found.text
    assert "docker volume rm slipstream_nats-data" in found.remedy


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"{}", b"\xff" * 300])
def test_damaged_data_are_a_warning_because_nats_goes_on_without(tmp_path: Path, garbage: bytes) -> None:
    put(tmp_path, "SS_USAGE").write_bytes(garbage)
    [found] = store_findings(tmp_path, SUBJECTS)
    assert found.state == "warning" and "SS_USAGE were damaged" in found.text and found.remedy


def test_data_of_somebody_else_fail_with_both_uids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Played, because root may read everything; in containers it is real (tests/compose)."""
    path = put(tmp_path, "SS_USAGE")
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != path.parent)
    [found] = store_findings(tmp_path, SUBJECTS)
    assert found.state == "failed" and f"{path.parent} belongs to uid {path.lstat().st_uid}" in found.text
    assert f"chown -R {os.getuid()}" in found.remedy


def test_secrets_says_it_writes_it_down_and_exits_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "data", "SS_DECODE", storage="file")
    command = [str(tmp_path / "secrets"), "--store-dir", str(tmp_path / "data")]
    assert secrets.run(command) == EnvironmentFault.exit_code
    assert "✘ stream SS_DECODE is of another version" in capsys.readouterr().out
    [noted] = noted_findings(tmp_path / "secrets" / "console")
    assert "SS_DECODE" in noted.text
    (tmp_path / "data" / "jetstream" / "APP" / "streams" / "SS_DECODE" / "meta.inf").unlink()
    assert secrets.run(command) == 0
    assert noted_findings(tmp_path / "secrets" / "console") == []


def test_a_note_that_is_absent_or_broken_says_nothing(tmp_path: Path) -> None:
    assert noted_findings(tmp_path) == []
    (tmp_path / NOTE).write_bytes(b"{")
    assert noted_findings(tmp_path) == []


def test_doctor_in_a_container_tells_what_was_noted_though_nats_is_away(tmp_path: Path) -> None:
    put(tmp_path / "data", "SS_DECODE", storage="file")
    secrets.run([str(tmp_path / "secrets"), "--store-dir", str(tmp_path / "data")])
    environ = {
        **os.environ,
        "SS_NATS_URL": "nats://127.0.0.1:9",
        "SS_NATS_USER": "console",
        "SS_NATS_PASSWORD_FILE": str(tmp_path / "secrets" / "console" / "password"),
        "SS_LOGS_COMMAND": "docker compose logs",
    }
    command = [sys.executable, "-m", "services.console", "doctor", "stack"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "cannot reach NATS at nats://127.0.0.1:9" in done.stdout and "docker compose logs setup nats" in done.stdout
    assert "SS_DECODE is of another version" in done.stdout
