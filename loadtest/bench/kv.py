"""How fast the KV store is: `python -m loadtest.bench.kv [--json]`. Rows `{"name", "value", "unit"}`; ratios are taken within one run."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.kvstore.config import KvStoreConfig
from services.kvstore.open_store import open_store
from services.kvstore.policies.lru import Lru
from services.kvstore.segments import Segments
from services.kvstore.store import BlockStore
from services.kvstore.tiers.base import Quota
from services.kvstore.tiers.index import Block, TierIndex
from services.kvstore.tiers.slab import SLAB
from services.kvstore.tiers.ssd import SsdTier
from shared.errors import NoResponders
from shared.kv.hashing import block_hashes
from shared.kv.layout import KvLayout
from shared.kv.slot_copy import BlockToStore
from shared.kvclient import KvClient
from shared.messages.codec import decode, encode
from shared.messages.kv import KvAcquire, KvCommit, KvCommitReply, KvRelease, KvReleaseReply, KvReserve
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry

SMOLLM2 = KvLayout(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")
MODEL = hashlib.sha256(b"bench").digest()
NUM_TOKENS = 1024
ROUNDS = 30


class Row(NamedTuple):
    """One measured value."""

    name: str
    value: float
    unit: str


class PoolOfBytes:
    """A device pool in plain memory."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.data = np.random.default_rng(1).integers(0, 255, (num_blocks, block_bytes), np.uint8)

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, out, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), self.data[block_id])

    def import_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        for block_id, source in zip(block_ids, data, strict=True):
            np.copyto(self.data[block_id], np.frombuffer(source, np.uint8))

    def host_block(self, block_id: int) -> memoryview:
        return memoryview(self.data[block_id])


class DirectBus:
    """Encodes, hands to the store in the same process, decodes: the arena's cost without a broker's."""

    def __init__(self, store: BlockStore) -> None:
        self._handlers: dict[str, Callable[[bytes], msgspec.Struct]] = {
            "reserve": lambda payload: store.reserve(decode(KvReserve, payload)),
            "commit": lambda payload: KvCommitReply(store.commit(decode(KvCommit, payload)).num_blocks),
            "acquire": lambda payload: store.acquire(decode(KvAcquire, payload)),
            "release": lambda payload: KvReleaseReply(store.release(decode(KvRelease, payload))),
        }

    async def request(self, subject: str, payload: bytes, *, timeout_s: float, headers: Any = None) -> Any:
        handler = self._handlers.get(subject.rpartition(".")[2])
        if handler is None:
            raise NoResponders(subject)
        return _Reply(encode(handler(payload)))

    async def publish(self, subject: str, payload: bytes, **unused: Any) -> None:
        await self.request(subject, payload, timeout_s=1.0)


class _Reply(NamedTuple):
    payload: bytes


async def _median_ms(operation: Callable[[], Awaitable[Any]], rounds: int = ROUNDS) -> float:
    taken = []
    for _ in range(rounds):
        begun = time.perf_counter()
        await operation()
        taken.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(taken)


async def handoff(directory: Path) -> list[Row]:
    """1,024 tokens of SmolLM2: reserve → write → commit, then acquire → verified blocks in another pool, beside a plain memcpy."""
    num_blocks = NUM_TOKENS // SMOLLM2.block_size
    store, _, _ = open_store(KvStoreConfig(kv_dir=directory, kv_dram=256 * 2**20), time.monotonic, lambda name, amount: None)
    bus: Any = DirectBus(store)
    writer_pool, reader_pool = (PoolOfBytes(num_blocks, SMOLLM2.block_bytes) for _ in range(2))
    telemetry = NullTelemetry()
    writer = KvClient(bus, Subjects(), telemetry, "aaaaaaaa", directory, SMOLLM2, MODEL, writer_pool)
    reader = KvClient(bus, Subjects(), telemetry, "bbbbbbbb", directory, SMOLLM2, MODEL, reader_pool)
    await writer.open()
    await reader.open()
    packed = np.arange(NUM_TOKENS, dtype=np.uint32).tobytes()
    hashes = block_hashes(MODEL, packed, SMOLLM2.block_size)
    step = 4 * SMOLLM2.block_size
    blocks = [
        BlockToStore(digest, parent, packed[index * step : (index + 1) * step], index, "")
        for index, (digest, parent) in enumerate(zip(hashes, [MODEL, *hashes], strict=False))
    ]
    write_ms = []
    for _ in range(ROUNDS // 3):
        store.dram.drop_model(MODEL)
        begun = time.perf_counter()
        await writer.store(blocks)
        write_ms.append((time.perf_counter() - begun) * 1e3)

    async def load() -> None:
        result = await reader.load(hashes, packed, range(num_blocks))
        if result.num_blocks != num_blocks:
            raise RuntimeError(f"only {result.num_blocks} of {num_blocks} blocks arrived: {result.reason}")

    async def memcpy() -> None:
        np.copyto(reader_pool.data, writer_pool.data)

    await load()
    load_ms = await _median_ms(load)
    memcpy_ms = await _median_ms(memcpy)
    await writer.close()
    await reader.close()
    store.dram.close()
    return [
        Row("handoff_1024_ms", load_ms, "ms"),
        Row("handoff_memcpy_ms", memcpy_ms, "ms"),
        Row("handoff_memcpy_ratio", memcpy_ms / load_ms, "ratio"),
        Row("handoff_write_ms", statistics.median(write_ms), "ms"),
    ]


class _Nobody:
    """Listens to no changes."""

    def stored(self, tier: Any, block: Block) -> None: ...

    def removed(self, tier: Any, block: Block, *, evicted: bool) -> None: ...


async def ssd_read(directory: Path, folder: Path) -> list[Row]:
    """Blocks of SmolLM2 from the SSD tier into arena slots, verified, beside `dd` with O_DIRECT over the same file."""
    config = KvStoreConfig(kv_dir=directory, kv_dram=256 * 2**20)
    store, _, _ = open_store(config, time.monotonic, lambda name, amount: None)
    tier = SsdTier(folder, 2**29, Lru, Quota(), _Nobody(), monotonic=time.monotonic, count=lambda name, amount: None)
    writer = KvClient(
        _direct(store), Subjects(), NullTelemetry(), "aaaaaaaa", directory, SMOLLM2, MODEL, PoolOfBytes(64, SMOLLM2.block_bytes)
    )
    await writer.open()
    packed = np.arange(512 * SMOLLM2.block_size, dtype=np.uint32).tobytes()
    hashes = block_hashes(MODEL, packed, SMOLLM2.block_size)
    step = 4 * SMOLLM2.block_size
    for index, (digest, parent) in enumerate(zip(hashes, [MODEL, *hashes], strict=False)):
        await writer.store([BlockToStore(digest, parent, packed[index * step : (index + 1) * step], index % 64, "")])
        upper = store.dram.index.blocks[digest[:16]]
        await tier.save(upper, store.dram.image(upper))
    await writer.close()
    targets = [store.dram.image(block) for block in list(store.dram.index.blocks.values())[:16]]
    ratios, speeds = [], []
    for _ in range(11):
        begun = time.perf_counter()
        num_bytes = await _read_all(tier, targets)
        speeds.append(num_bytes / (time.perf_counter() - begun) / 1e6)
        ratios.append(speeds[-1] / await _dd_mb_per_s(folder / SLAB, num_bytes))
    tier.close()
    store.dram.close()
    return [Row("ssd_read_mb_per_s", statistics.median(speeds), "MB/s"), Row("ssd_read_dd_ratio", statistics.median(ratios), "ratio")]


async def _read_all(tier: SsdTier, targets: Sequence[memoryview]) -> int:
    """Every block once, as many at a time as there are targets; returns bytes read."""
    waiting = list(tier.index.blocks.values())
    num_bytes = sum(block.size_class.slot_bytes for block in waiting)

    async def read_into(target: memoryview) -> None:
        while waiting:
            if not await tier.load(waiting.pop(), target):
                raise RuntimeError("a block of the SSD tier did not come back")

    await asyncio.gather(*(read_into(target) for target in targets))
    return num_bytes


async def _dd_mb_per_s(path: Path, num_bytes: int) -> float:
    arguments = (f"if={path}", "of=/dev/null", "iflag=direct", "bs=1M", f"count={num_bytes // 2**20}", "status=none")
    begun = time.perf_counter()
    process = await asyncio.create_subprocess_exec("dd", *arguments)
    if await process.wait():
        raise RuntimeError(f"dd cannot read {path} with O_DIRECT")
    return num_bytes / (time.perf_counter() - begun) / 1e6


def _direct(store: BlockStore) -> Any:
    return DirectBus(store)


def _keys(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def store_operation_us(num_blocks: int, num_tenants: int = 1, num_operations: int = 20_000) -> float:
    """µs for one block's life in a full tier: take a slot (the biggest tenant's last goes), insert, find, touch, hold, let go."""
    segments = Segments(129, -(-num_blocks // 128) * 8192, 0, lambda extent, in_use: True)
    size_class = segments.size_class("00" * 8, 4096)
    index = TierIndex(Lru)
    parent = bytes(32)
    for number in range(num_blocks):
        digest = _keys(number)
        offset = segments.take_slot(size_class)
        assert offset is not None
        tenant = str(number // 32 % num_tenants)
        index.insert(Block(digest, parent if number % 32 else bytes(32), MODEL, tenant, size_class, offset, number))
        parent = digest
    digests = [_keys(num_blocks + number) for number in range(num_operations)]
    begun = time.perf_counter()
    for number, digest in enumerate(digests):
        share = next(index.shares.biggest_first(size_class.layout))
        evicted = index.evict(share, digest[:16])
        assert evicted is not None
        parent, tenant = digests[number - 1] if number % 32 else bytes(32), str(number // 32 % num_tenants)
        block = Block(digest, parent, MODEL, tenant, size_class, evicted.offset, number)
        index.insert(block)
        found = index.get(digest, MODEL)
        assert found is not None
        index.touch(found)
        index.hold(found)
        index.unhold(found)
    return (time.perf_counter() - begun) / num_operations * 1e6


def measure(disk: Path) -> list[Row]:
    """All rows. `disk`: a folder on the device to measure."""
    directory = Path(tempfile.mkdtemp(prefix="slipstream-bench-", dir="/dev/shm"))
    try:
        rows = asyncio.run(handoff(directory))
    finally:
        shutil.rmtree(directory)
    directory, folder = Path(tempfile.mkdtemp(prefix="slipstream-bench-", dir="/dev/shm")), Path(tempfile.mkdtemp(dir=disk))
    try:
        rows += asyncio.run(ssd_read(directory, folder))
    finally:
        shutil.rmtree(directory)
        shutil.rmtree(folder)
    rows.append(Row("store_op_1k_us", store_operation_us(1_000), "us"))
    rows.append(Row("store_op_1m_us", store_operation_us(1_000_000), "us"))
    rows.append(Row("store_op_10k_tenants_us", store_operation_us(1_000_000, num_tenants=10_000), "us"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="slipstream bench kv", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a folder on the SSD to measure (default: here)")
    arguments = parser.parse_args(argv)
    if not arguments.disk.is_dir():
        parser.error(f"--disk {arguments.disk}: there is no such folder")
    rows = measure(arguments.disk)
    if arguments.json:
        json.dump([row._asdict() for row in rows], sys.stdout)
        print()
        return 0
    for row in rows:
        print(f"{row.name:24} {row.value:10.3f} {row.unit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
