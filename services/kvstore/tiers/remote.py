"""Other hosts' stores: pushes of committed blocks to the host that will decode, and pulls of blocks that will be wanted here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from services.kvstore.incoming import Incoming
from services.kvstore.peer import Channel, call
from services.kvstore.store import BlockStore
from services.kvstore.tiers.index import Block
from services.kvstore.transfer import send_blocks, take_blocks
from shared.errors import SlipstreamError, TransferFailed
from shared.messages.kv import BlockOffer, BlockPull
from shared.telemetry import Telemetry
from shared.types import HostId

_log = logging.getLogger(__name__)

AddressOf = Callable[[HostId], str | None]
Spawn = Callable[[Coroutine[Any, Any, None], str], None]


class Push(NamedTuple):
    """Blocks of one commit on their way to one host; held until sent or given up."""

    blocks: list[Block]
    num_bytes: int


class Peers:
    """One sending task and one connection a host. At most a quarter of the arena is held for pushes; what is beyond is not sent."""

    def __init__(self, store: BlockStore, secret: bytes, address_of: AddressOf, spawn: Spawn, telemetry: Telemetry) -> None:
        self._store = store
        self._incoming = Incoming(store)
        self._secret = secret
        self._address_of = address_of
        self._spawn = spawn
        self._telemetry = telemetry
        self._max_bytes = store.dram.segments.num_bytes // 4
        self._num_bytes = 0
        self._queues: dict[HostId, asyncio.Queue[Push]] = {}

    def push(self, host: HostId, blocks: list[Block]) -> bool:
        """Send blocks, which are held once for this, to `host` in order. False: too much is waiting already; they are let go."""
        push = Push(blocks, sum(block.size_class.slot_bytes for block in blocks))
        if self._num_bytes + push.num_bytes > self._max_bytes:
            self._telemetry.count("kv_push_blocks", len(blocks), outcome="refused")
            self._let_go(blocks)
            return False
        self._num_bytes += push.num_bytes
        queue = self._queues.get(host)
        if queue is None:
            queue = self._queues[host] = asyncio.Queue()
            self._spawn(self._send_all(host, queue), f"push to {host}")
        queue.put_nowait(push)
        return True

    async def _send_all(self, host: HostId, queue: asyncio.Queue[Push]) -> None:
        channel: Channel | None = None
        try:
            while True:
                push = await queue.get()
                try:
                    channel = channel or await self._connect(host)
                    await self._send(channel, push)
                except (SlipstreamError, TimeoutError) as error:
                    if channel is not None:
                        channel.close()
                    channel = None
                    self._telemetry.count("kv_push_blocks", len(push.blocks), outcome="failed")
                    _log.warning("%d blocks were not pushed to host %s: %s", len(push.blocks), host, error)
                finally:
                    self._num_bytes -= push.num_bytes
                    self._let_go(push.blocks)
        finally:
            if channel is not None:
                channel.close()

    async def _send(self, channel: Channel, push: Push) -> None:
        num_taken, num_bytes = await send_blocks(channel, self._store.dram.memory, push.blocks, handoff=True)
        self._telemetry.count("kv_push_blocks", num_taken, outcome="sent")
        self._telemetry.count("kv_push_bytes", num_bytes)

    async def fetch(self, hosts: list[HostId], model_digest: bytes, keys: list[bytes]) -> None:
        """Get what can be had of these blocks ahead of their use, from the first host that gives any. Announced, so that acquires wait."""
        self._store.under_way.announce(keys)
        for host in hosts:
            try:
                if await self.pull(host, model_digest, keys):
                    break
            except (SlipstreamError, TimeoutError) as error:
                _log.info("nothing was fetched from host %s: %s", host, error or type(error).__name__)
        for key in keys:
            if not self._store.under_way.is_written(key):
                self._store.under_way.end(key)

    async def pull(self, host: HostId, model_digest: bytes, keys: list[bytes]) -> int:
        """Fetch what `host` holds of these; returns blocks taken. Raises TransferFailed or PeerRefused."""
        channel = await self._connect(host)
        try:
            await channel.send(BlockPull(model_digest, b"".join(keys)))
            offer = await channel.receive(BlockOffer)
            if not offer.block_hashes:
                return 0
            num_taken, num_bytes = await take_blocks(channel, self._incoming, offer)
            self._telemetry.count("kv_pull_blocks", num_taken)
            self._telemetry.count("kv_pull_bytes", num_bytes)
            return num_taken
        finally:
            channel.close()

    async def _connect(self, host: HostId) -> Channel:
        address = self._address_of(host)
        if not address:
            raise TransferFailed(host, "no store with this host id is known")
        return await call(address, self._secret, self._store.dram.arena.host, host)

    def _let_go(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._store.dram.unhold(block)
