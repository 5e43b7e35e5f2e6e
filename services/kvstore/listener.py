"""The socket of SS_KV_BIND: takes blocks that other hosts push, and gives those that they pull."""

from __future__ import annotations

import asyncio
import logging
import socket

from services.kvstore.incoming import Incoming
from services.kvstore.peer import Channel, PeerRefused, greet
from services.kvstore.store import BlockStore
from services.kvstore.transfer import send_blocks, take_blocks
from shared.errors import EnvironmentFault, SlipstreamError
from shared.messages.kv import BlockOffer, BlockPull, PeerMessage
from shared.telemetry import Telemetry
from shared.types import KEY_BYTES

_log = logging.getLogger(__name__)
_MAX_PEERS = 256
_NO_LAYOUT = "0" * 16


class Listener:
    """Accepts connections of other stores; one task each. Whoever does not know the secret is refused and counted."""

    def __init__(self, bind: tuple[str, int], store: BlockStore, secret: bytes, telemetry: Telemetry) -> None:
        self._store = store
        self._incoming = Incoming(store)
        self._secret = secret
        self._telemetry = telemetry
        self._connections: set[asyncio.Task[None]] = set()
        host, port = bind
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(64)
        except OSError as error:
            self._sock.close()
            raise EnvironmentFault(
                f"SS_KV_BIND={host}:{port} cannot be bound: {error.strerror}", remedy="use another port, or 0"
            ) from error
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]

    async def run(self) -> None:
        """Accept until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            sock, address = await loop.sock_accept(self._sock)
            if len(self._connections) >= _MAX_PEERS:
                sock.close()
                self._telemetry.count("kv_peer_refused", 1, reason="too_many")
                continue
            task = loop.create_task(self._serve(Channel(sock, f"{address[0]}:{address[1]}")))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, channel: Channel) -> None:
        """One connection, from handshake to end. A fault ends it; the store is unharmed."""
        try:
            channel.peer = await greet(channel, self._secret, self._store.dram.arena.host)
            while True:
                await self._answer(channel, await channel.receive_any(PeerMessage))
        except PeerRefused as error:
            self._telemetry.count("kv_peer_refused", 1, reason="wrong_secret")
            _log.warning("a connection to the KV socket was refused: %s", error)
        except (SlipstreamError, TimeoutError) as error:
            _log.info("the connection with %s ended: %s", channel.peer, error or type(error).__name__)
        finally:
            channel.close()

    async def _answer(self, channel: Channel, message: BlockOffer | BlockPull) -> None:
        match message:
            case BlockOffer():
                num_taken, num_bytes = await take_blocks(channel, self._incoming, message)
                self._telemetry.count("kv_taken_blocks", num_taken)
                self._telemetry.count("kv_taken_bytes", num_bytes)
            case BlockPull():
                await self._give(channel, message)

    async def _give(self, channel: Channel, pull: BlockPull) -> None:
        dram = self._store.dram
        keys = [pull.block_keys[at : at + KEY_BYTES] for at in range(0, len(pull.block_keys), KEY_BYTES)]
        found = [dram.index.blocks[key] for key in keys if key in dram.index.blocks]
        blocks = [block for block in found if block.model_digest == pull.model_digest]
        if not blocks:
            await channel.send(BlockOffer(pull.model_digest, _NO_LAYOUT, 0, b"", b"", []))
            return
        for block in blocks:
            dram.hold(block)
        try:
            await send_blocks(channel, dram.memory, blocks, handoff=False)
        finally:
            for block in blocks:
                dram.unhold(block)

    async def close(self) -> None:
        """Stop accepting and end every connection. Idempotent."""
        self._sock.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
