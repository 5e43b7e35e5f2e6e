"""What is not as it must be: the service concerned says so in a line, and doctor finds it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.support.compose import Compose, OtherCompose, ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


def test_a_port_that_is_taken_is_named(compose: Compose) -> None:
    with contextlib.closing(OtherCompose(compose)) as other:
        done = other.run("up", "-d", "--no-build", check=False, SS_HTTP_PORT=str(compose.http_port))
        assert done.returncode != 0
        assert f"127.0.0.1:{compose.http_port}" in done.stderr


@pytest.mark.parametrize(("options", "why"), [("size=16m,uid=10001,mode=0700", "512 MiB"), ("size=600m,uid=0,mode=0700", "/kv")])
def test_an_arena_that_cannot_be_made_costs_the_tier_and_not_the_service(compose: Compose, tmp_path: Path, options: str, why: str) -> None:
    """Too small, or somebody else's."""
    override = tmp_path / "arena.yml"
    override.write_text(f"volumes: {{ arena: {{ driver_opts: {{ type: tmpfs, device: tmpfs, o: '{options}' }} }} }}")
    with contextlib.closing(OtherCompose(compose)) as other:
        other.run("-f", "docker-compose.yml", "-f", str(override), "up", "-d", "--no-build", "--wait", "--scale", "decode=1")
        logs = other.run("logs", "--no-color", "kvstore").stdout
        [line] = [line for line in logs.splitlines() if "no KV store on this host" in line]
        assert why in line and "Traceback" not in logs
        assert other.counted(other.containers("kvstore")[0], "slipstream_kv_tier_refused_total") == 1
        answer = asyncio.run(ask(other, 4))
        assert answer.is_ok, answer.error


def test_secrets_that_are_gone_are_one_line_and_no_traceback(compose: Compose) -> None:
    with contextlib.closing(OtherCompose(compose)) as other:
        done = other.run("run", "--rm", "--no-deps", "-v", "/secrets/router", "router", check=False)
        assert done.returncode in (2, 3)
        assert "/secrets/router/password" in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
