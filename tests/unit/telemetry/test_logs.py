"""Log lines: JSON, with ids, and nothing that was not asked for."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from shared.errors import ConfigError
from shared.telemetry.logs import concern, ids_of, set_up_logs


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


TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def test_a_tasks_lines_carry_its_requests_ids_and_no_others_do(stream: io.StringIO) -> None:
    log = logging.getLogger("x")

    async def child() -> None:
        log.info("child")

    async def task() -> None:
        concern("r" * 32, TRACEPARENT)
        log.info("task")
        await asyncio.create_task(child())

    await asyncio.create_task(task())
    log.info("outside")
    of_task, of_child, outside = lines(stream)
    for line in (of_task, of_child):
        assert (line["request_id"], line["trace_id"]) == ("r" * 32, "a" * 32)
    assert outside.keys().isdisjoint({"request_id", "trace_id"})


async def test_a_line_with_ids_of_its_own_keeps_them(stream: io.StringIO) -> None:
    concern("r" * 32, TRACEPARENT)
    logging.getLogger("x").info("another's", extra=ids_of("s" * 32, TRACEPARENT.replace("a", "c")))
    (line,) = lines(stream)
    assert (line["request_id"], line["trace_id"]) == ("s" * 32, "c" * 32)
    concern("", "")
