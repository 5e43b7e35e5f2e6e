"""What the store's tests share: a clock, a device pool of bytes, chains of blocks, a store over a small arena, and a bus of one process."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from services.kvstore.config import KvStoreConfig
from services.kvstore.events import KvEvents
from services.kvstore.ladder import Ladder
from services.kvstore.open_store import open_store
from services.kvstore.store import BlockStore
from shared.kv import slot
from shared.kv.hashing import block_hashes
from shared.kv.layout import KvLayout
from shared.kv.slot_copy import BlockToStore
from shared.kv.slot_writer import WriterLock
from shared.messages.kv import KvAcquire, KvCommit, KvRelease, KvReserve, KvReserveReply
from shared.types import pack_tokens

LAYOUT = KvLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=32, dtype="float32")
MODEL = hashlib.sha256(b"model").digest()
SEED = hashlib.sha256(MODEL + bytes(32)).digest()
WORKER = "aaaaaaaa"


class Clock:
    """Seconds that go on only when told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Pool:
    """A device pool of plain bytes, in the host's memory as a CPU's, or not, as a GPU's."""

    def __init__(self, num_blocks: int, layout: KvLayout = LAYOUT, *, is_on_host: bool = True) -> None:
        self.data = np.zeros((num_blocks, layout.block_bytes), np.uint8)
        self.is_on_host = is_on_host

    def host_block(self, block_id: int) -> memoryview | None:
        return memoryview(self.data[block_id]) if self.is_on_host else None

    def fill(self, seed: int = 0) -> None:
        self.data[:] = np.random.default_rng(seed).integers(0, 256, self.data.shape, np.uint8)

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, out, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), self.data[block_id])

    def import_blocks(self, block_ids: Sequence[int], data: Sequence[memoryview]) -> None:
        for block_id, source in zip(block_ids, data, strict=True):
            np.copyto(self.data[block_id], np.frombuffer(source, np.uint8))


class Chain:
    """Blocks of one prompt: `hashes[i]` follows `hashes[i - 1]`."""

    def __init__(self, num_blocks: int, first_token: int = 0, seed: bytes = SEED, block_size: int = LAYOUT.block_size) -> None:
        self.seed = seed
        self.token_ids = list(range(first_token, first_token + num_blocks * block_size))
        self.packed = pack_tokens(self.token_ids)
        self.hashes = block_hashes(seed, self.packed, block_size)
        self.step = 4 * block_size

    def parents(self) -> list[bytes]:
        return [self.seed, *self.hashes[:-1]]

    def to_store(self, block_ids: Sequence[int] | None = None, tenant: str = "") -> list[BlockToStore]:
        block_ids = block_ids or range(len(self.hashes))
        tokens = [self.packed[at * self.step : (at + 1) * self.step] for at in range(len(self.hashes))]
        return [BlockToStore(*parts, tenant) for parts in zip(self.hashes, self.parents(), tokens, block_ids, strict=True)]


class Store:
    """A store over a small arena, driven without a bus, and a writer that follows the arena protocol by hand."""

    def __init__(self, directory: Path, num_bytes: int = 2**20, policy: str = "lru", layout: KvLayout = LAYOUT, **settings: float) -> None:
        self.directory = directory
        self.layout = layout
        self.clock = Clock()
        self.counts: Counter[str] = Counter()
        config = KvStoreConfig(kv_dir=directory, kv_dram=num_bytes, kv_policy=policy, **settings)  # type: ignore[arg-type]
        self.store: BlockStore
        self.events: KvEvents
        self.ladder: Ladder
        self.store, self.events, self.ladder = open_store(config, self.clock, lambda name, amount: self.counts.update({name: amount}))
        self.locks: dict[str, WriterLock] = {}

    def join(self, worker: str = WORKER) -> None:
        """A worker comes and holds its lock."""
        if worker not in self.locks:
            self.locks[worker] = WriterLock(self.directory, worker)

    def leave(self, worker: str = WORKER) -> None:
        """A worker dies: the kernel frees its lock."""
        self.locks.pop(worker).close()

    def reserve(self, chain: Chain, worker: str = WORKER, tenant: str = "", model: bytes = MODEL, handoff: bool = False) -> KvReserveReply:
        self.join(worker)
        return self.store.reserve(
            KvReserve(
                worker,
                model,
                self.layout.digest,
                self.layout.block_bytes,
                b"".join(chain.parents()),
                b"".join(chain.hashes),
                [tenant],
                handoff,
            )
        )

    def write(self, chain: Chain, reply: KvReserveReply, fill: Callable[[int], int] = lambda index: index % 251) -> None:
        memory = self.store.dram.memory
        for index, place in enumerate(reply.slots):
            if place.present:
                continue
            payload = slot.payload(memory, place.offset, self.layout.block_bytes)
            payload[:] = bytes([fill(index)]) * len(payload)
            slot.write_content(
                memory,
                place.offset,
                writer=WORKER,
                packed_tokens=chain.packed[index * chain.step : (index + 1) * chain.step],
                payload_format="native",
                length=len(payload),
                checksum=slot.xxhash.xxh3_64_intdigest(payload),
            )

    def put(self, chain: Chain, worker: str = WORKER, tenant: str = "", handoff_host: str | None = None, model: bytes = MODEL) -> int:
        """Reserve, write, commit; returns blocks committed."""
        reply = self.reserve(chain, worker, tenant, model, handoff_host is not None)
        self.write(chain, reply)
        if not reply.lease_id:
            return 0
        return self.store.commit(KvCommit(worker, reply.lease_id, handoff_host)).num_blocks

    def acquire(self, chain: Chain, worker: str = WORKER, model: bytes = MODEL):  # type: ignore[no-untyped-def]
        return self.store.acquire(KvAcquire(worker, model, self.layout.digest, b"".join(chain.hashes)))

    def release(self, lease_id: int, worker: str = WORKER, bad: bytes = b"") -> int:
        return self.store.release(KvRelease(worker, lease_id, bad))

    def num_held(self, chain: Chain, model: bytes = MODEL) -> int:
        """Leading blocks that can be found (a probe)."""
        held = [self.store.dram.get(digest, model) is not None for digest in chain.hashes]
        return held.index(False) if False in held else len(held)

    def close(self) -> None:
        for lock in self.locks.values():
            lock.close()
        self.store.dram.close()
