"""What a service is told when NATS is not as it must be: one error with cause and remedy, in bounded time, and nothing printed."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.bus.nats import connect
from shared.bus.permissions import USERS, render_server_config
from shared.config import ServiceConfig
from shared.errors import ConfigError, EnvironmentFault
from shared.messages.subjects import Subjects
from tests.support.nats import WITHOUT_JETSTREAM, NatsServer
from tests.support.nats_operator import operator_config
from tests.support.proxy import Proxy

SUBJECTS = Subjects("ss")


@pytest.fixture(autouse=True)
async def _nothing_is_left(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> AsyncIterator[None]:
    caplog.set_level(logging.INFO)
    yield
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info] == []
    assert capfd.readouterr() == ("", "")


def free_port() -> int:
    with socket.socket() as endpoint:
        endpoint.bind(("127.0.0.1", 0))
        return int(endpoint.getsockname()[1])


async def fault(config: ServiceConfig, wait_s: float = 0.5) -> EnvironmentFault:
    async with asyncio.timeout(10):
        with pytest.raises(EnvironmentFault) as caught:
            await connect(config, name="test", wait_s=wait_s)
    assert caught.value.exit_code == 3
    assert caught.value.remedy
    assert "\n" not in caught.value.message
    return caught.value


async def test_nobody_listens() -> None:
    url = f"nats://127.0.0.1:{free_port()}"
    told = await fault(ServiceConfig(nats_url=url))
    assert url in told.message
    assert "Connect call failed" in told.message
    assert "SS_NATS_URL" in told.remedy


async def test_an_unknown_host() -> None:
    told = await fault(ServiceConfig(nats_url="nats://nobody.invalid:4222"))
    assert "nobody.invalid" in told.message


@pytest.mark.parametrize("url", ["nats://", "http://[", "nats://127.0.0.1:notaport"])
async def test_not_a_url(url: str) -> None:
    assert "SS_NATS_URL" in (await fault(ServiceConfig(nats_url=url))).remedy


async def test_a_server_that_never_answers(own_nats_server: NatsServer) -> None:
    async with Proxy(own_nats_server.port) as proxy:
        proxy.black_hole()
        assert "cannot reach NATS" in (await fault(ServiceConfig(nats_url=proxy.url))).message


async def test_something_else_listens() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert "cannot reach NATS" in (await fault(ServiceConfig(nats_url=f"nats://127.0.0.1:{port}"))).message
    server.close()
    await server.wait_closed()


async def test_a_server_without_jetstream(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "plain", WITHOUT_JETSTREAM)
    server.start()
    told = await fault(ServiceConfig(nats_url=server.url))
    server.close()
    assert "no JetStream" in told.message
    assert "-js" in told.remedy


async def test_a_server_that_comes_late(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "late")
    server.port = free_port()
    connecting = asyncio.ensure_future(connect(ServiceConfig(nats_url=server.url), name="test"))
    await asyncio.sleep(0.3)
    server.start()
    bus = await connecting
    assert bus.is_connected
    await bus.close()
    server.close()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """A server with the rendered configuration; the password of user X is `pw-X`."""
    text = render_server_config(
        subjects=SUBJECTS,
        passwords={user: f"pw-{user}" for user in USERS},
        store_dir=tmp_path / "store",
        port=-1,
        ports_file_dir=tmp_path / "guarded",
    )
    server = NatsServer(tmp_path / "guarded", text.replace("{", "{{").replace("}", "}}").replace("port: -1", "port: {port}"))
    server.start()
    yield server
    server.close()


async def test_a_wrong_password(guarded: NatsServer, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    told = await fault(ServiceConfig(nats_url=guarded.url, nats_user="router", nats_password_file=password), wait_s=30)
    assert "does not accept the user or password" in told.message
    assert "SS_NATS_PASSWORD_FILE" in told.remedy
    assert "wrong" not in told.message


async def test_no_user_where_one_is_needed(guarded: NatsServer) -> None:
    assert "does not accept" in (await fault(ServiceConfig(nats_url=guarded.url), wait_s=30)).message


async def test_the_right_password(guarded: NatsServer, tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("pw-router\n")
    bus = await connect(ServiceConfig(nats_url=guarded.url, nats_user="router", nats_password_file=password), name="router-0")
    await bus.bucket(SUBJECTS.bucket("workers"))
    await bus.close()


@pytest.mark.parametrize("field", ["nats_password_file", "nats_creds"])
async def test_files_that_are_not_there(field: str, tmp_path: Path) -> None:
    config = ServiceConfig(**{"nats_user": "router", field: tmp_path / "absent"})
    with pytest.raises(ConfigError) as caught:
        await connect(config, name="test")
    assert caught.value.variable == f"SS_{field.upper()}"


@pytest.mark.parametrize("content", [b"", b"nothing of the kind\n", b"\xff\xfe\x00", b"-----BEGIN NATS USER JWT-----\nx\n"])
async def test_credentials_that_are_not_valid(content: bytes, tmp_path: Path) -> None:
    creds = tmp_path / "creds"
    creds.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        await connect(ServiceConfig(nats_creds=creds), name="test")
    assert caught.value.variable == "SS_NATS_CREDS"


async def test_credentials_of_another_operator(guarded: NatsServer, tmp_path: Path) -> None:
    creds = tmp_path / "creds"
    creds.write_text(
        "-----BEGIN NATS USER JWT-----\nnot.a.jwt\n------END NATS USER JWT------\n"
        "-----BEGIN USER NKEY SEED-----\nSUANOTASEED\n------END USER NKEY SEED------\n"
    )
    assert (await fault(ServiceConfig(nats_url=guarded.url, nats_creds=creds))).remedy


async def test_credentials_of_an_operators_cluster(tmp_path: Path) -> None:
    creds = tmp_path / "creds"
    server = NatsServer(tmp_path / "operated", operator_config(creds))
    server.start()
    bus = await connect(ServiceConfig(nats_url=server.url, nats_creds=creds), name="test")
    bucket = await bus.bucket(SUBJECTS.bucket("config"))
    assert await bucket.put("a", b"") > 0
    await bus.close()
    assert "does not accept" in (await fault(ServiceConfig(nats_url=server.url), wait_s=30)).message
    server.close()
