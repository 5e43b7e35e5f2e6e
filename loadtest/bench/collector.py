"""A collector for measuring, as a process of its own: takes spans, hangs, or is dead, as it is told on its stdin.

`python -m loadtest.bench.collector` prints its port, then obeys a word a line and repeats it once it is so, with how many batches came:
`takes` answers every batch, `hangs` reads and answers nothing, `dead` closes its port and every connection.
"""

from __future__ import annotations

import asyncio
import sys

_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"


class Switch:
    """The listening side. An empty answer is a whole ExportTraceServiceResponse."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.port = 0
        self._hangs = False
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def be(self, what: str) -> None:
        """`takes`, `hangs` or `dead`. Connections of before are cut, so that nobody waits for the answer of another mode."""
        self._hangs = what == "hangs"
        for writer in self._open:
            writer.transport.abort()
        if what == "dead" and self._server:
            self._server.close()
            self._server = None
        elif what != "dead" and not self._server:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n")[0]))
                self.num_batches += 1
                if not self._hangs:
                    writer.write(_ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # it hung up
        finally:
            self._open.discard(writer)
            writer.close()


async def main() -> None:
    """Until stdin ends."""
    switch = Switch()
    await switch.be("takes")
    print(switch.port, flush=True)
    while what := (await asyncio.to_thread(sys.stdin.readline)).strip():
        await switch.be(what)
        print(what, switch.num_batches, flush=True)


if __name__ == "__main__":
    asyncio.run(main())
