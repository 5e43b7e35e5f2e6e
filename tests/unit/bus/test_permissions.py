from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from shared.bus.permissions import USERS, render_server_config
from shared.messages.subjects import Subjects
from tests.support.nats import find_nats_server


def render(tmp_path: Path, **changed: object) -> str:
    options: dict[str, object] = {"subjects": Subjects(), "passwords": dict.fromkeys(USERS, "x"), "store_dir": tmp_path / "js"}
    return render_server_config(**(options | changed))  # type: ignore[arg-type]


def accepted(tmp_path: Path, text: str, environ: dict[str, str] | None = None) -> str:
    """What nats-server says about the file."""
    (tmp_path / "nats.conf").write_text(text)
    command = [find_nats_server(), "-t", "-c", str(tmp_path / "nats.conf")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environ)
    return f"{ended.returncode} {ended.stdout}{ended.stderr}"


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"host": "0.0.0.0", "port": 4333, "monitoring_port": None},
        {"monitoring_port": 8222, "monitoring_host": "0.0.0.0", "ports_file_dir": "/tmp/x y"},
        {"store_dir": '/tmp/a "quoted" folder', "passwords": {"router": 'quo"ted {}$', "client": "$2a$11$bcryptbcryptbcryptbcry"}},
        {"passwords": {}},
        {"subjects": Subjects("blue2")},
    ],
    ids=str,
)
def test_nats_server_accepts_it(changed: dict[str, object], tmp_path: Path) -> None:
    assert accepted(tmp_path, render(tmp_path, **changed)).startswith("0 ")


def test_a_password_from_the_servers_environment(tmp_path: Path) -> None:
    text = render(tmp_path, passwords={"router": "$ROUTER_PASSWORD"})
    assert "password: $ROUTER_PASSWORD," in text
    assert accepted(tmp_path, text, {"ROUTER_PASSWORD": "secret"}).startswith("0 ")
    assert accepted(tmp_path, text, {}).startswith("1 ")


def test_nothing_is_open(tmp_path: Path) -> None:
    text = render(tmp_path)
    assert "no_auth_user" not in text
    assert 'host: "127.0.0.1"' in text
    assert 'http: "127.0.0.1:-1"' in text
    assert "max_payload: 1048576" in text
    assert text.count("allow:") == 2 * len(USERS)
