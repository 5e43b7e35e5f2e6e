"""Load blocks into the device pool, store blocks from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shared.bus.base import Bus
from shared.errors import BusError, KvError
from shared.kv.arena import Arena
from shared.kv.layout import KvLayout, LowerFormat
from shared.kv.slot_copy import BlockDevice, BlockToStore, Expected, Place, copy_in, copy_out
from shared.kvclient.link import ANSWER_S, StoreLink, T
from shared.messages import kv
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import HostId, InstanceId, Tier

_log = logging.getLogger(__name__)

_WINDOW_BLOCKS = 256
"""Blocks under one lease: a lease must outlive the copy of all of them."""


class LoadResult(NamedTuple):
    """`num_blocks` leading blocks lie in the pool, verified; `reason` says why the rest does not ("" if there is no rest)."""

    num_blocks: int
    num_bytes: int
    tiers: list[Tier]
    reason: str


class StoreResult(NamedTuple):
    """Blocks newly stored, and blocks that were there already (or are being written by somebody else)."""

    num_stored: int
    num_present: int
    num_bytes: int
    reason: str


class KvClient:
    """One worker's connection to its host's store. `host` is None while there is none; it is looked for again once a second."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        telemetry: Telemetry,
        instance: InstanceId,
        kv_dir: Path | None,
        layout: KvLayout,
        model_digest: bytes,
        device: BlockDevice,
        payload_format: LowerFormat = "native",
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = StoreLink(bus, subjects, telemetry, instance, kv_dir, monotonic=monotonic)
        self._telemetry = telemetry
        self._instance = instance
        self._layout = layout
        self._model_digest = model_digest
        self._device = device
        self._format = payload_format
        self._monotonic = monotonic
        self._last_number = 0
        self._unfinished: set[int] = set()
        """Numbers of reservations under which we write, or may yet."""

    @property
    def host(self) -> HostId | None:
        return self._link.host

    async def open(self) -> None:
        """Map the arena, if there is one. No store is no fault."""
        await self._link.open()

    async def close(self) -> None:
        """Unmap, after the copies under way. Idempotent."""
        await self._link.close()

    # -- load ----------------------------------------------------------------------------------------------------------
    async def load(
        self,
        hashes: Sequence[bytes],
        packed_tokens: bytes,
        block_ids: Sequence[int],
        *,
        wait_ms: float = 0.0,
        traceparent: str = "",
        block_ms: float = 0.0,
    ) -> LoadResult:
        """Copy the longest leading run of these blocks into `block_ids` of the pool.

        `packed_tokens` are the tokens of exactly these blocks. `wait_ms`: how long blocks that are under way (from another host, from
        the SSD) may take; what nobody sends is not waited for. `block_ms`: what computing one block takes, if known: what a tier would
        take longer to load is not loaded (`slower_than_recompute`).
        """
        started_s = self._monotonic()
        total = LoadResult(0, 0, [], "")
        while total.num_blocks < len(hashes):
            at = total.num_blocks
            window = slice(at, at + _WINDOW_BLOCKS)
            tokens = packed_tokens[at * self._token_bytes :]
            try:
                part = await self._load_window(hashes[window], tokens, block_ids[window], wait_ms, traceparent, block_ms)
            except (KvError, BusError) as error:
                part = LoadResult(0, 0, [], self._link.fault("load", error))
            total = LoadResult(
                total.num_blocks + part.num_blocks, total.num_bytes + part.num_bytes, [*total.tiers, *part.tiers], part.reason
            )
            if part.num_blocks < len(hashes[window]):
                break
        for tier in set(total.tiers):
            self._telemetry.count("kvclient_loaded_blocks", total.tiers.count(tier), tier=tier)
        self._telemetry.count("kvclient_loaded_bytes", total.num_bytes)
        self._telemetry.observe("kvclient_load_seconds", self._monotonic() - started_s)
        return total

    @property
    def _token_bytes(self) -> int:
        """Of one block's packed token ids."""
        return 4 * self._layout.block_size

    async def _load_window(
        self, hashes: Sequence[bytes], tokens: bytes, block_ids: Sequence[int], wait_ms: float, traceparent: str, block_ms: float
    ) -> LoadResult:
        arena = await self._link.attached()
        acquire = kv.KvAcquire(
            self._instance, self._model_digest, self._layout.digest, b"".join(hashes), min(wait_ms, 60_000.0), traceparent, block_ms
        )
        reply = await self._link.ask("acquire", acquire, kv.KvAcquireReply, ANSWER_S + wait_ms / 1000)
        if not reply.slots:
            return LoadResult(0, 0, [], reply.reason or "cold")
        places = [Place(one.offset, one.generation) for one in reply.slots[: len(hashes)]]
        expected = self._expected(hashes[: len(places)], memoryview(tokens))
        bad = b""
        try:
            num_good, verdict = await self._copy(
                lambda: copy_in(arena.memory, places, expected, block_ids[: len(places)], self._device), block_ids[: len(places)]
            )
            if verdict == "corrupt":
                bad = hashes[num_good]
                self._telemetry.count("kvclient_corrupt_blocks")
                _log.warning("a block failed its check after the copy; it is dropped and computed again")
        finally:
            await self._link.tell("release", kv.KvRelease(self._instance, reply.lease_id, bad))
        return LoadResult(num_good, num_good * self._layout.block_bytes, reply.tiers[:num_good], verdict or reply.reason)

    def _expected(self, hashes: Sequence[bytes], tokens: memoryview) -> list[Expected]:
        step, num_bytes = self._token_bytes, self._layout.block_bytes
        return [
            Expected(digest, self._model_digest, tokens[index * step : (index + 1) * step], num_bytes, self._format)
            for index, digest in enumerate(hashes)
        ]

    # -- store ---------------------------------------------------------------------------------------------------------
    async def store(
        self,
        blocks: Sequence[BlockToStore],
        *,
        handoff_host: HostId | None = None,
        traceparent: str = "",
        copied: Callable[[], None] | None = None,
    ) -> StoreResult:
        """Put full blocks of the pool into the store, in chain order. With `handoff_host`, they are kept for (and sent to) that host.

        `copied` is called if all of them lie in the arena and the store is about to be told: the pool's blocks are not read any more, and
        whoever acquires them on this host waits for the store's word as long as he says.
        """
        started_s = self._monotonic()
        total = StoreResult(0, 0, 0, "")
        for at in range(0, len(blocks), _WINDOW_BLOCKS):
            window = blocks[at : at + _WINDOW_BLOCKS]
            is_last = at + _WINDOW_BLOCKS >= len(blocks)
            try:
                part = await self._store_window(window, handoff_host, traceparent, copied if is_last else None)
            except (KvError, BusError) as error:
                part = StoreResult(0, 0, 0, self._link.fault("store", error))
            total = StoreResult(
                total.num_stored + part.num_stored, total.num_present + part.num_present, total.num_bytes + part.num_bytes, part.reason
            )
            if part.reason:
                break
        self._telemetry.count("kvclient_stored_blocks", total.num_stored)
        self._telemetry.count("kvclient_stored_bytes", total.num_bytes)
        self._telemetry.observe("kvclient_store_seconds", self._monotonic() - started_s)
        return total

    async def _store_window(
        self, blocks: Sequence[BlockToStore], handoff_host: HostId | None, traceparent: str, copied: Callable[[], None] | None
    ) -> StoreResult:
        arena = await self._link.attached()
        self._last_number += 1
        number = self._last_number
        self._unfinished.add(number)
        try:
            return await self._store_under(number, arena, blocks, handoff_host, traceparent, copied)
        finally:
            self._unfinished.discard(number)

    async def _store_under(
        self,
        number: int,
        arena: Arena,
        blocks: Sequence[BlockToStore],
        handoff_host: HostId | None,
        traceparent: str,
        copied: Callable[[], None] | None,
    ) -> StoreResult:
        reserve = kv.KvReserve(
            self._instance,
            self._model_digest,
            self._layout.digest,
            self._layout.block_bytes,
            b"".join(block.parent for block in blocks),
            b"".join(block.hash for block in blocks),
            [block.tenant for block in blocks],
            handoff_host is not None,
            number,
            min(self._unfinished),
        )
        reply = await self._link.ask("reserve", reserve, kv.KvReserveReply)
        to_write = [(block, Place(at.offset, at.generation)) for block, at in zip(blocks, reply.slots, strict=False) if not at.present]
        num_present = len(reply.slots) - len(to_write)
        if not reply.lease_id:
            return StoreResult(0, num_present, 0, reply.reason)
        is_whole = False
        try:
            is_whole = await self._copy(lambda: self._copy_out(arena, to_write), [block.block_id for block, _ in to_write])
        finally:
            if not is_whole:
                await self._link.tell("release", kv.KvRelease(self._instance, reply.lease_id))
        if not is_whole:
            return StoreResult(0, num_present, 0, "lease_expired")
        if copied is not None and not reply.reason:
            copied()
        commit = kv.KvCommit(self._instance, reply.lease_id, handoff_host, traceparent)
        done = await self._link.ask("commit", commit, kv.KvCommitReply)
        return StoreResult(done.num_blocks, num_present, done.num_blocks * self._layout.block_bytes, reply.reason)

    async def _copy(self, work: Callable[[], T], block_ids: Sequence[int]) -> T:
        """Run `work`, which copies these blocks of the pool; a device that is not memory of this process may make it wait."""
        in_memory = bool(block_ids) and self._device.host_block(block_ids[0]) is not None
        return await self._link.copy(work, len(block_ids), len(block_ids) * self._layout.block_bytes, in_memory=in_memory)

    def _copy_out(self, arena: Arena, to_write: Sequence[tuple[BlockToStore, Place]]) -> bool:
        blocks, places = [block for block, _ in to_write], [place for _, place in to_write]
        return copy_out(arena.memory, places, blocks, self._layout.block_bytes, self._instance, self._device, self._format)
