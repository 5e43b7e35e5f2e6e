"""What we change of nats-py's client: how it closes, when it writes, how it hands messages over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.transport import TcpTransport


class Transport(TcpTransport):  # type: ignore[misc]
    """Closes at once and takes back what was not read: a graceful close would wait for a deaf server, and the kernel deliver late."""

    def __bool__(self) -> bool:
        return True  # or the client would put its own in our place

    async def connect(self, *args: Any, **kwargs: Any) -> None:
        self.close()  # nats-py forgets a connection that broke before it was greeted
        await super().connect(*args, **kwargs)

    def close(self) -> None:
        if self._io_writer is None or self._io_writer.is_closing():
            return
        with contextlib.suppress(OSError, ValueError):  # broken already
            self._io_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._io_writer.transport.abort()

    def at_eof(self) -> bool:
        return self._io_reader is not None and self._io_reader.at_eof()

    @property
    def is_closing(self) -> bool:
        """Nothing can be written any more, whether or not nats-py knows it yet."""
        return self._io_writer is None or self._io_writer.is_closing()

    @property
    def num_unsent_bytes(self) -> int:
        """Written by us, and not yet taken by the kernel."""
        return 0 if self._io_writer is None else int(self._io_writer.transport.get_write_buffer_size())


class WritingClient(Client):  # type: ignore[misc]
    """Writes at once. nats-py wakes a task for each message that does nothing else, and later: a tenth of a millisecond a hop."""

    _pending: list[bytes]
    _pending_data_size: int

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        if self.is_connected and self._pending and not self._transport.is_closing:  # what a broken link holds is dropped with it
            unsent, self._pending, self._pending_data_size = self._pending, [], 0
            self._transport.writelines(unsent)
        written = asyncio.get_running_loop().create_future()
        written.set_result(None)
        return written


class Sink:
    """Takes the place of a subscription's future, so that messages come by plain call: no queue, task or limit of nats-py between."""

    def __init__(self, take: Callable[[Any], None]) -> None:
        self.set_result = take

    def cancelled(self) -> bool:
        return False
