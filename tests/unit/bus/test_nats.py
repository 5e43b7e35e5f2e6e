from __future__ import annotations

import inspect
from pathlib import Path

import nats.errors
import nats.js.errors
import pytest

import shared.bus
from shared.bus.nats import TRANSLATIONS, translate
from shared.errors import BusClosed, BusError, BusTimeout, LinkDown, NoResponders

MODULES = [nats.errors, nats.js.errors]
FOREIGN = [
    error
    for module in MODULES
    for _, error in inspect.getmembers(module, inspect.isclass)
    if issubclass(error, Exception) and error.__module__ == module.__name__
]


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: f"{error.__module__}.{error.__name__}")
def test_every_error_of_the_client_has_one_of_ours(error: type[Exception]) -> None:
    if error is nats.errors.Error:
        return  # the root itself is raised with a text; its table entry would hide what is missing
    assert any(cause in TRANSLATIONS for cause in error.__mro__)
    translated = translate(error.__new__(error), "ss.v1.cancel")
    assert isinstance(translated, BusError)


def test_the_table_keeps_apart_what_callers_treat_apart() -> None:
    assert type(translate(nats.errors.TimeoutError(), "a")) is BusTimeout
    assert type(translate(nats.errors.FlushTimeoutError(), "a")) is BusTimeout
    assert type(translate(nats.errors.NoRespondersError(), "a")) is NoResponders
    assert type(translate(nats.errors.UnexpectedEOF(), "a")) is LinkDown
    assert type(translate(ConnectionResetError(), "a")) is LinkDown
    assert type(translate(nats.errors.ConnectionClosedError(), "a")) is BusClosed
    assert type(translate(nats.errors.Error("nats: odd"), "a")) is BusError
    assert "odd" in translate(nats.errors.Error("nats: odd"), "a").message


def test_the_root_is_not_in_the_table() -> None:
    assert nats.errors.Error not in TRANSLATIONS


def test_two_files_alone_import_nats() -> None:
    root = Path(shared.bus.__path__[0]).parents[1]
    importers = [
        path.relative_to(root).as_posix()
        for folder in ("shared", "services", "loadtest")
        for path in (root / folder).rglob("*.py")
        if any(
            line.split()[:2] == [word, "nats"] or line.startswith((f"{word} nats.",))
            for line in path.read_text().splitlines()
            for word in ("import", "from")
        )
    ]
    assert sorted(importers) == ["shared/bus/nats.py", "shared/bus/nats_client.py"]
