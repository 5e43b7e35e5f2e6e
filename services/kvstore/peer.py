"""The connection between two stores: authenticated both ways with the cluster secret, bounded frames, raw payloads without copies.

A frame is its length (u32, little-endian) and a msgpack message. The proof is bound to both nonces, both hosts and the direction, so
that it can be neither replayed nor reflected. What follows the handshake is neither encrypted nor authenticated: between machines that do
not trust their network, run it through a tunnel.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from typing import Any, TypeVar

import msgspec

from shared.errors import KvError, TransferFailed
from shared.messages.codec import decode, decode_union, encode
from shared.messages.kv import PeerChallenge, PeerProof, PeerWelcome

M = TypeVar("M", bound=msgspec.Struct)

MAX_FRAME_BYTES = 4 * 2**20
_MAX_HANDSHAKE_FRAME_BYTES = 256
HANDSHAKE_S = 3.0
STALL_S = 5.0
"""A peer that moves nothing for so long is given up."""


class PeerRefused(KvError):
    """The other side does not know the cluster secret."""

    code = "peer_refused"


class Channel:
    """One connection, after or during the handshake. Every wait is bounded by STALL_S; any fault raises TransferFailed."""

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self.peer = peer
        self._loop = asyncio.get_running_loop()

    async def send(self, message: msgspec.Struct) -> None:
        payload = encode(message)
        await self.send_bytes(len(payload).to_bytes(4, "little") + payload)

    async def send_bytes(self, data: bytes | memoryview) -> None:
        """Raw bytes, straight from where they lie."""
        await self._bounded(self._loop.sock_sendall(self._sock, data))

    async def receive(self, message_type: type[M], max_bytes: int = MAX_FRAME_BYTES, wait_s: float | None = STALL_S) -> M:
        return decode(message_type, await self._frame(max_bytes, wait_s))

    async def receive_any(self, union: Any, wait_s: float | None = None) -> Any:
        """One message of a closed union; by default waits for ever for it to begin."""
        return decode_union(union, await self._frame(MAX_FRAME_BYTES, wait_s))

    async def receive_into(self, memory: memoryview) -> None:
        """Raw bytes, straight to where they shall lie."""
        filled = 0
        while filled < len(memory):
            filled += await self._some(memory[filled:], STALL_S)

    async def _frame(self, max_bytes: int, wait_s: float | None) -> memoryview:
        size = bytearray(4)
        begun = await self._some(memoryview(size), wait_s)
        await self.receive_into(memoryview(size)[begun:])
        num_bytes = int.from_bytes(size, "little")
        if num_bytes > max_bytes:
            raise TransferFailed(self.peer, f"a frame of {num_bytes} bytes, the limit is {max_bytes}")
        frame = bytearray(num_bytes)
        await self.receive_into(memoryview(frame))
        return memoryview(frame)

    async def _some(self, memory: memoryview, wait_s: float | None) -> int:
        received = await self._bounded(self._loop.sock_recv_into(self._sock, memory), wait_s)
        if not received:
            raise TransferFailed(self.peer, "closed by the other side")
        return int(received)

    async def _bounded(self, operation: Any, wait_s: float | None = STALL_S) -> Any:
        try:
            async with asyncio.timeout(wait_s):
                return await operation
        except TimeoutError as error:
            raise TransferFailed(self.peer, f"nothing moved for {wait_s:g} s") from error
        except OSError as error:
            raise TransferFailed(self.peer, error.strerror or type(error).__name__) from error

    def close(self) -> None:
        self._sock.close()


def _proof(secret: bytes, side: bytes, listener: PeerChallenge, caller_host: str, caller_nonce: bytes) -> bytes:
    parts = (b"slipstream kv peer v1", side, listener.host.encode(), listener.nonce, caller_host.encode(), caller_nonce)
    return hmac.digest(secret, b"".join(len(part).to_bytes(4, "little") + part for part in parts), "sha256")


async def greet(channel: Channel, secret: bytes, host: str) -> str:
    """The listener's side of the handshake; returns the caller's host. Raises PeerRefused."""
    challenge = PeerChallenge(host, secrets.token_bytes(32))
    async with asyncio.timeout(HANDSHAKE_S):
        await channel.send(challenge)
        answer = await channel.receive(PeerProof, _MAX_HANDSHAKE_FRAME_BYTES)
        if not hmac.compare_digest(answer.proof, _proof(secret, b"caller", challenge, answer.host, answer.nonce)):
            raise PeerRefused(f"{channel.peer} does not know the cluster secret")
        await channel.send(PeerWelcome(_proof(secret, b"listener", challenge, answer.host, answer.nonce)))
    return answer.host


async def call(address: str, secret: bytes, host: str, expected_host: str) -> Channel:
    """Connect to another store and shake hands. Raises PeerRefused or TransferFailed."""
    peer_host, _, port = address.rpartition(":")
    sock = socket.socket(socket.AF_INET6 if ":" in peer_host else socket.AF_INET, socket.SOCK_STREAM)
    channel = Channel(sock, expected_host)
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await asyncio.get_running_loop().sock_connect(sock, (peer_host.strip("[]"), int(port)))
            challenge = await channel.receive(PeerChallenge, _MAX_HANDSHAKE_FRAME_BYTES)
            if challenge.host != expected_host:
                raise PeerRefused(f"{address} is host {challenge.host}, not {expected_host}")
            nonce = secrets.token_bytes(32)
            await channel.send(PeerProof(host, nonce, _proof(secret, b"caller", challenge, host, nonce)))
            welcome = await channel.receive(PeerWelcome, _MAX_HANDSHAKE_FRAME_BYTES)
            if not hmac.compare_digest(welcome.proof, _proof(secret, b"listener", challenge, host, nonce)):
                raise PeerRefused(f"{address} does not know the cluster secret")
    except (TimeoutError, OSError, ValueError) as error:
        channel.close()
        raise TransferFailed(expected_host, f"no connection to {address}: {error or type(error).__name__}") from error
    except BaseException:
        channel.close()
        raise
    return channel
