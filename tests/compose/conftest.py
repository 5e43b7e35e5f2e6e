"""One stack for all tests on docker-compose.yml: it takes half a minute to be ready."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.compose import Compose


@pytest.fixture(scope="session")
def compose() -> Iterator[Compose]:
    stack = Compose()
    try:
        stack.run("up", "-d", "--build", "--wait")
        yield stack
        logs = stack.run("logs", "--no-color").stdout
        assert "Traceback" not in logs, logs[logs.index("Traceback") - 500 :][:4000]
    finally:
        stack.run("down", "-v", "-t", "5", check=False)
