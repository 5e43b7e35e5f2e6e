"""Log lines: JSON, with ids, and nothing that was not asked for."""

import io
import json
import logging
from collections.abc import Iterator

import pytest

from shared.errors import ConfigError
from shared.telemetry.logs import set_up_logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    made = io.StringIO()
    set_up_logs("decode-0", "12345678", "info", made)
    yield made
    logging.captureWarnings(False)
    root.handlers, root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, str]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_says_who_and_what(stream: io.StringIO) -> None:
    logging.getLogger("x").info("took %d", 3, extra={"request_id": "ab", "trace_id": "cd", "prompt": "secret"})
    (line,) = lines(stream)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "service": "decode-0",
        "instance": "12345678",
        "logger": "x",
        "message": "took 3",
        "request_id": "ab",
        "trace_id": "cd",
    }


def test_a_traceback_stays_on_its_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("x").exception("failed")
    (line,) = lines(stream)
    assert "ValueError: no" in line["traceback"]


def test_the_level_is_kept(stream: io.StringIO) -> None:
    logging.getLogger("x").debug("quiet")
    logging.getLogger("nats").info("quiet too")
    assert lines(stream) == []


def test_an_unknown_level_names_the_variable() -> None:
    with pytest.raises(ConfigError, match="SS_LOG_LEVEL='loud'"):
        set_up_logs("x", "12345678", "loud")
