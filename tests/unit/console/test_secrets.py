"""Secrets of a stack in containers: one folder a user, private, and kept."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from services.console.__main__ import main
from services.console.broker import find_server
from shared.bus.permissions import USERS


def test_each_user_has_a_password_of_its_own_and_the_server_knows_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["secrets", str(tmp_path)]) == 0
    assert "10 secrets made" in capsys.readouterr().out
    passwords = {user: (tmp_path / user / "password").read_text() for user in USERS}
    assert len(set(passwords.values())) == len(USERS)
    config = tmp_path / "nats" / "nats.conf"
    assert all(password in config.read_text() for password in passwords.values())
    for path in (config, *tmp_path.glob("*/password"), *tmp_path.glob("*/cluster")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    checked = subprocess.run([find_server(), "--config", str(config), "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


def test_the_stores_and_gateways_share_the_cluster_secret(tmp_path: Path) -> None:
    main(["secrets", str(tmp_path)])
    assert (tmp_path / "gateway" / "cluster").read_text() == (tmp_path / "kvstore" / "cluster").read_text()
    assert not (tmp_path / "decode" / "cluster").exists()


def test_what_is_there_stays_and_what_is_missing_is_made_to_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["secrets", str(tmp_path)])
    kept = {path: path.read_text() for path in tmp_path.glob("*/*")}
    capsys.readouterr()
    (tmp_path / "kvstore" / "cluster").unlink()
    (tmp_path / "decode" / "password").unlink()
    assert main(["secrets", str(tmp_path)]) == 0
    assert "2 secrets made" in capsys.readouterr().out
    changed = {path.relative_to(tmp_path) for path, text in kept.items() if path.read_text() != text}
    assert changed == {Path("decode/password"), Path("nats/nats.conf")}


def test_a_place_that_cannot_be_written_is_one_line_with_a_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["secrets", str(tmp_path / "file")]) == 3
    told = capsys.readouterr().err
    assert f"must belong to uid {os.getuid()}" in told and "Remove the volume" in told
