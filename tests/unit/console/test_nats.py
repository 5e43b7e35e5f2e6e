import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.console import nats as command
from services.console.nats import server_config, url_with_user
from services.console.run_folder import Run, write_secret
from services.console.terminal import Terminal
from shared.bus.base import Message
from shared.bus.memory import MemoryBroker, MemoryBus

ROOT = Path(__file__).parents[3]


def make(tmp_path: Path, **fields: Any) -> Run:
    return Run(folder=tmp_path, pid=1, pid_start=1, version="1", namespace="ss", nats_url="nats://127.0.0.1:4222", **fields)


def test_the_address_for_programs_of_ones_own(tmp_path: Path) -> None:
    password_file = write_secret(tmp_path / "client", "p@ss/word\n")
    run = make(tmp_path, nats_client_user="client", nats_client_password_file=password_file)
    assert url_with_user(run) == "nats://client:p%40ss%2Fword@127.0.0.1:4222"
    assert url_with_user(make(tmp_path)) == "nats://127.0.0.1:4222"
    several = msgspec.structs.replace(run, nats_url="nats://a:1, b:2")
    assert url_with_user(several) == "nats://client:p%40ss%2Fword@a:1,nats://client:p%40ss%2Fword@b:2"


def test_the_configuration_in_the_repository_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(["config"]) == 0
    assert capsys.readouterr().out == (ROOT / "infra/nats/slipstream.conf").read_text()


def test_the_configuration_holds_no_password() -> None:
    assert server_config("ss", "/data").count("password: $SS_NATS_PASSWORD_") == 8


ANSWERS = [
    {
        "name": "slipstream-gateway",
        "id": "X1",
        "version": "0.1.0",
        "description": "front doors",
        "rtt_ms": 1.25,
        "endpoints": [
            {
                "name": "generate",
                "subject": "ss.v1.generate",
                "queue_group": "gateway",
                "num_requests": 3,
                "num_errors": 1,
                "processing_time": 6_000_000_000,
                "average_processing_time": 2_000_000_000,
            }
        ],
    },
    {"name": "slipstream-router", "id": "X2", "version": "0.1.0", "rtt_ms": 2.0},
]


@pytest.mark.parametrize(
    ("verb", "row"),
    [
        ("ls", ("slipstream-gateway", "0.1.0", "X1", "front doors")),
        ("ping", ("slipstream-gateway", "X1", "1.2 ms")),
        ("info", ("slipstream-gateway", "X1", "generate", "ss.v1.generate", "gateway")),
        ("stats", ("X1", "generate", "3", "gateway", "1", "6.00s", "2000.0 ms")),
    ],
)
def test_columns_are_those_of_nats_micro(verb: str, row: tuple[str, ...]) -> None:
    rows = command._ROWS[verb](msgspec.json.decode(msgspec.json.encode(ANSWERS)))
    assert rows[1] == row
    assert all(len(each) == len(rows[0]) for each in rows)


@pytest.mark.parametrize(
    ("typed", "asked"), [("decode", "slipstream-decode"), ("slipstream-decode", "slipstream-decode"), ("mine", "mine")]
)
def test_a_service_may_be_called_by_its_role(typed: str, asked: str) -> None:
    assert command._parser().parse_args(["ls", typed]).service == asked


def test_the_address_for_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "find_run", lambda *_: make(tmp_path))
    assert command.run(["url", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"url": "nats://127.0.0.1:4222"}


async def test_headers_travel_with_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    bus = MemoryBus(MemoryBroker())

    async def answer(message: Message) -> bytes:
        return message.headers["authorization"].encode()

    serving = await bus.serve("a.b", answer)
    options = command._parser().parse_args(["req", "a.b", "-H", "Authorization: Bearer ss-1"])
    assert await command._request(bus, Terminal(), options) == 0
    await serving.close()
    await bus.close()
    assert capsys.readouterr().out == "Bearer ss-1\n"


@pytest.mark.parametrize("header", ["Authorization", "a b: c", ": c", "a: b\r\nc: d", "a: ü"])
def test_what_is_no_header(header: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no header"):
        command._header(header)
