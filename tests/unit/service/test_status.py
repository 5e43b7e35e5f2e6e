"""Status lines: whole, and never in the way."""

import json
import os
from collections.abc import Iterator

import pytest

from shared.errors import ConfigError
from shared.service.status import StatusPipe


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        try:
            os.close(fd)
        except OSError:
            continue  # the test closed it


def test_a_line_for_each_thing_told(pipe: tuple[int, int]) -> None:
    read_end, write_end = pipe
    status = StatusPipe.of({"SS_STATUS_FD": str(write_end)})
    status.phase("loading", 0.25)
    status.ready("http://127.0.0.1:8000")
    status.failed(ConfigError("SS_X", 1, "no", remedy="Set it"))
    assert [json.loads(line) for line in os.read(read_end, 65536).splitlines()] == [
        {"state": "phase", "text": "loading", "fraction": 0.25},
        {"state": "ready", "detail": "http://127.0.0.1:8000"},
        {"state": "failed", "code": "bad_config", "message": "SS_X=1: no", "remedy": "Set it", "exit": 2},
    ]


def test_a_reader_that_does_not_read_holds_nobody_up(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    _, write_end = pipe
    status = StatusPipe(write_end)
    for _ in range(2000):
        status.phase("x" * 1000)
    assert "dropped" in caplog.text


def test_a_reader_that_went_away_is_noted_once(pipe: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    read_end, write_end = pipe
    os.close(read_end)
    status = StatusPipe(write_end)
    status.phase("x")
    status.phase("y")
    assert caplog.text.count("nobody reads") == 1


def test_a_descriptor_that_is_none_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    StatusPipe(999).phase("x")
    assert "SS_STATUS_FD=999" in caplog.text


@pytest.mark.parametrize("environ", [{}, {"SS_STATUS_FD": ""}, {"SS_STATUS_FD": "three"}])
def test_without_a_descriptor_nothing_is_said(environ: dict[str, str]) -> None:
    StatusPipe.of(environ).ready("x")
