"""A TCP proxy that plays the network's faults: latency, a black hole, resets, and bytes that nobody sent."""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType

CHUNK_BYTES = 64 * 1024
TCP_ESTABLISHED = 1


class Proxy:
    """Stands between clients and `port` of this host. `async with Proxy(port) as proxy:` … connect to `proxy.port`."""

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.latency_s = 0.0
        """Added to every chunk, each way."""
        self.num_connections = 0
        """Accepted so far."""
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._through: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._server
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def black_hole(self) -> None:
        """Connections stay open, new ones are accepted, and nothing comes through."""
        self._flowing.clear()

    def mend(self) -> None:
        """End of the black hole; what waited comes through, unless its sender gave up."""
        self._flowing.set()

    def is_given_up(self) -> bool:
        """Every client whose connection reached the server has closed it."""
        return not any(_is_established(writer) for writer in self._through)

    def reset(self) -> None:
        """RST on every connection."""
        for writer in list(self._writers):
            endpoint = writer.get_extra_info("socket")
            if endpoint is not None and endpoint.fileno() >= 0:
                endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def inject(self, data: bytes) -> None:
        """Send bytes to every client, as if the server had."""
        for writer in self._clients:
            writer.write(data)

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A plain function, so that asyncio's streams do not own the task."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        self._clients.add(writer)
        try:
            await self._flowing.wait()
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(server_writer)
            try:
                await self._run(reader, writer, server_reader, server_writer)
            finally:
                self._writers.discard(server_writer)
                server_writer.transport.abort()
        except OSError:
            pass  # the server is down: so is this connection
        finally:
            self._writers.discard(writer)
            self._clients.discard(writer)
            writer.transport.abort()

    async def _run(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
    ) -> None:
        """Until either side ends."""
        self._through.add(writer)
        ways = [
            asyncio.ensure_future(self._pump(reader, writer, server_writer)),
            asyncio.ensure_future(self._pump(server_reader, server_writer, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._through.discard(writer)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, sender: asyncio.StreamWriter, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            if not self._flowing.is_set():
                await self._flowing.wait()
                if not _is_established(sender):
                    return  # it gave up meanwhile: what it sent is lost
            writer.write(data)
            await writer.drain()


def _is_established(writer: asyncio.StreamWriter) -> bool:
    endpoint = writer.get_extra_info("socket")
    return (
        endpoint is not None
        and endpoint.fileno() >= 0
        and endpoint.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
    )
