import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.console import preflight
from services.console.preflight import (
    ServerInfo,
    check_jetstream,
    check_port,
    check_shared_memory,
    file_system,
    free_port,
    port_holder,
    read_server_info,
)
from shared.errors import ConfigError, EnvironmentFault


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_names_its_holder_and_another_port(taken_port: int) -> None:
    with pytest.raises(EnvironmentFault) as caught:
        check_port("127.0.0.1", taken_port, flag="--port")
    assert f"127.0.0.1:{taken_port} is in use by pid {os.getpid()} (" in caught.value.message
    assert caught.value.remedy == f"Use another: slipstream up --port {taken_port + 1}"
    assert caught.value.exit_code == 3


def test_a_port_that_a_stack_has_may_be_given_back(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "port_holder", lambda _: "pid 7 (python -P -m services.gateway)")
    with pytest.raises(EnvironmentFault) as caught:
        check_port("127.0.0.1", taken_port, flag="--port")
    assert caught.value.remedy.endswith("\nOr stop the stack that has it: slipstream down")


def test_an_address_that_is_not_of_this_machine_is_not_the_ports_fault() -> None:
    with pytest.raises(EnvironmentFault, match="cannot be bound") as caught:
        check_port("192.0.2.1", 8000, flag="--port")
    assert "--host" in caught.value.remedy and "--port" not in caught.value.remedy


def test_a_free_port_passes() -> None:
    check_port("127.0.0.1", free_port("127.0.0.1"), flag="--port")


def test_the_holder_may_be_another_process() -> None:
    program = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as holder:
        assert holder.stdout
        assert port_holder(int(holder.stdout.readline())).startswith(f"pid {holder.pid} (")


def test_an_arena_needs_tmpfs_with_room(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    assert file_system(shared) == "tmpfs"
    check_shared_memory(shared, 1, 2**20)
    with pytest.raises(EnvironmentFault, match=r"free, 2 arenas of .* asked for") as caught:
        check_shared_memory(shared, 2, 2**50)
    assert "--kv-dram" in caught.value.remedy


def test_a_disk_is_refused() -> None:
    folder = Path(__file__).parent
    assert file_system(folder) not in ("tmpfs", "an unknown file system")
    with pytest.raises(EnvironmentFault, match="not on tmpfs"):
        check_shared_memory(folder, 1, 1)


async def answer_with(line: bytes) -> tuple[asyncio.Server, str]:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(line)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_first_line_of_a_server_is_read() -> None:
    server, url = await answer_with(b'INFO {"version":"2.15.1","max_payload":1048576,"jetstream":true,"more":1} \r\n')
    info = await read_server_info(url)
    server.close()
    assert (info.version, info.jetstream) == ("2.15.1", True)


@pytest.mark.parametrize("line", [b"HTTP/1.1 400 Bad Request\r\n", b"INFO nonsense\r\n", b""])
async def test_something_else_than_nats_is_told_apart(line: bytes) -> None:
    server, url = await answer_with(line)
    with pytest.raises(EnvironmentFault, match="no NATS server"):
        await read_server_info(url)
    server.close()


async def test_nobody_there() -> None:
    with pytest.raises(EnvironmentFault, match="cannot be reached") as caught:
        await read_server_info(f"nats://127.0.0.1:{free_port('127.0.0.1')}")
    assert "nats-server -js" in caught.value.remedy


async def test_no_address_at_all() -> None:
    with pytest.raises(ConfigError):
        await read_server_info("nats://")


def test_jetstream_is_needed() -> None:
    with pytest.raises(EnvironmentFault, match="without JetStream"):
        check_jetstream(ServerInfo("2.15.1", 2**20), "nats://x")


async def test_of_several_servers_one_is_enough() -> None:
    server, url = await answer_with(b'INFO {"version":"2.15.1","max_payload":1048576,"jetstream":true} \r\n')
    deaf = f"nats://127.0.0.1:{free_port('127.0.0.1')}"
    assert (await read_server_info(f"{deaf}, {url}")).jetstream
    server.close()
    with pytest.raises(EnvironmentFault) as caught:
        await read_server_info(f"{deaf},{deaf.replace('127.0.0.1', '127.0.0.2')}")
    assert caught.value.message.count("cannot be reached: Connection refused") == 2, "each is told, as the system calls it"


async def test_a_line_without_an_end_is_not_nats() -> None:
    server, url = await answer_with(b"INFO " + b"x" * 2**17)
    with pytest.raises(EnvironmentFault, match="no NATS server"):
        await read_server_info(url)
    server.close()


@pytest.mark.parametrize(
    "url",
    [
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:many",
        "nats://[::1",
        "http://127.0.0.1:4222",
        "nats://a:1,",
        "nats://a:1,nats://",
        "nats://a..b",
        "nats://a:0",
    ],
)
async def test_what_is_no_address_is_a_setting_that_does_not_fit(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        await read_server_info(url)
