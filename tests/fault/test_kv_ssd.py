"""Faults of the SSD: bit flips, torn and swapped files, a full or hanging disk, folders that are not ours (T27 to T33)."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvstore.config import KvStoreConfig
from services.kvstore.open_store import open_store
from services.kvstore.tiers.journal import JOURNAL
from services.kvstore.tiers.slab import SLAB
from shared.errors import ConfigError, EnvironmentFault
from shared.kv import slot
from tests.support.kvssd import Ssd
from tests.support.kvstore import LAYOUT, Chain, Store


@pytest.fixture
def store() -> Iterator[Store]:
    directory = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    made = Store(directory, num_bytes=4 * 2**20)
    yield made
    made.close()
    shutil.rmtree(directory)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))
        file.flush()
        os.fsync(file.fileno())


REGIONS = {
    "header": (slot.OWNED_BYTES, 160),
    "header checksum": (160, 168),
    "token ids": (256, 256 + 4 * LAYOUT.block_size),
    "keys": (slot.HEADER_BYTES, slot.HEADER_BYTES + LAYOUT.block_bytes // 2),
    "values": (slot.HEADER_BYTES + LAYOUT.block_bytes // 2, slot.HEADER_BYTES + LAYOUT.block_bytes),
}


async def test_256_bit_flips_are_all_caught(store: Store, folder: Path) -> None:
    """T27: each drops its block and what follows it; nothing else, and never a wrong byte."""
    ssd, rng = Ssd(folder, store), random.Random(27)
    regions = list(REGIONS.values())
    for number in range(256):
        chain = Chain(3, first_token=100 * number)
        assert await ssd.put(chain) == 3
        block = ssd.block(chain, 1)
        assert block is not None
        start, end = regions[number % len(regions)]
        flip(folder / SLAB, block.offset + rng.randrange(start, end), rng.randrange(8))
        assert await ssd.get(chain, 1) is None, number
        assert [ssd.block(chain, index) is not None for index in range(3)] == [True, False, False]
        assert await ssd.num_readable(chain) == 1
        store.store.drop(store.store.dram.index.blocks[chain.hashes[0][:16]])
        if len(ssd.tier.quarantined) % 32 == 31:  # damaged slots are not used again until the next start
            ssd.tier.close()
            counted = ssd.counts
            ssd = Ssd(folder, store)
            ssd.counts.update(counted)
    assert ssd.counts["kv_corrupt"] == 256
    ssd.tier.check_integrity()
    ssd.tier.close()


async def test_a_damaged_block_whose_damaged_parent_dropped_it_while_it_was_read_keeps_its_slot(store: Store, folder: Path) -> None:
    """T27: both slots stay out of use, and each is counted once however many read it."""
    ssd, chain = Ssd(folder, store), Chain(2)
    assert await ssd.put(chain) == 2
    blocks = [ssd.block(chain, 0), ssd.block(chain, 1)]
    damaged = {block.offset for block in blocks if block is not None}
    for offset in damaged:
        flip(folder / SLAB, offset + slot.HEADER_BYTES, 0)
    assert await asyncio.gather(*(ssd.get(chain, index) for index in (0, 1, 0, 1))) == [None] * 4
    assert len(ssd.tier.quarantined) == ssd.counts["kv_corrupt"] == 2
    (size_class,) = ssd.tier.segments.classes.values()
    assert size_class.num_used == 2 and not damaged & set(size_class.free)
    ssd.tier.close()


@pytest.mark.parametrize("damage", ["truncated", "empty", "appended", "swapped", "zeroed"])
async def test_a_damaged_slab_is_a_miss(store: Store, folder: Path, damage: str) -> None:
    """T28."""
    ssd, chain = Ssd(folder, store), Chain(4)
    await ssd.put(chain)
    first, last = ssd.block(chain, 0), ssd.block(chain, 3)
    assert first is not None and last is not None
    size = first.size_class.slot_bytes
    ssd.tier.close()
    path = folder / SLAB
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        raw = raw[: last.offset + 100]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "appended":
        raw += bytes(5000)
    elif damage == "swapped":
        a, b = slice(first.offset, first.offset + size), slice(last.offset, last.offset + size)
        raw[a], raw[b] = raw[b], raw[a]
    else:
        raw[first.offset : first.offset + size] = bytes(size)
    path.write_bytes(raw)
    again = Ssd(folder, store)
    expected = {"truncated": 3, "empty": 0, "appended": 4, "swapped": 0, "zeroed": 0}[damage]
    assert await again.num_readable(chain) == expected
    again.tier.close()


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "junk behind", "another version"])
async def test_a_damaged_journal_forgets_but_never_lies(store: Store, folder: Path, damage: str) -> None:
    """T28, T33."""
    ssd, chain = Ssd(folder, store), Chain(8)
    await ssd.put(chain)
    ssd.tier.close()
    path = folder / JOURNAL
    raw = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        flip(path, len(raw) // 2, 3)
    elif damage == "junk behind":
        path.write_bytes(raw + b"\xff" * 100)
    else:
        path.write_bytes(b"SSJOURN\x09" + raw[8:])
    again = Ssd(folder, store)
    num_readable = await again.num_readable(chain)
    assert num_readable == 8 if damage == "junk behind" else num_readable < 8
    other = Chain(4, first_token=900)
    assert await again.put(other) == 4 and await again.num_readable(other) == 4
    again.tier.close()
    assert await Ssd(folder, store).num_readable(other) == 4


def test_killed_in_the_middle_of_writing_100_times_no_block_is_torn(store: Store, folder: Path) -> None:
    """T29: kill -9 at a random moment; whatever can be found afterwards is whole."""
    command = [sys.executable, "-m", "tests.support.kv_torn_writes", str(store.directory / "writer"), str(folder), "100"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    num_checked, num_damaged = map(int, done.stdout.split())
    assert num_checked > 200 and num_damaged == 0


async def test_a_full_disk_stops_growth_and_nothing_else(store: Store, folder: Path) -> None:
    """T30: no room → the tier works within what it has; room again → it grows, without a restart."""
    ssd = Ssd(folder, store)
    ssd.tier._is_set_aside = False  # as on a disk that had no room for all of it at the start
    chains = [Chain(8, first_token=1000 * number) for number in range(40)]
    assert await ssd.put(chains[0]) == 8
    ssd.disk.full = True
    for chain in chains[1:10]:
        await ssd.put(chain)
    held_while_full = len(ssd.tier.index)
    assert held_while_full == ssd.tier.segments.size_class(LAYOUT.digest, LAYOUT.block_bytes).num_slots
    assert ssd.counts["kv_ssd_full"] > 0
    assert await ssd.num_readable(chains[9]) == 8
    ssd.disk.full = False
    for chain in chains[10:]:
        await ssd.put(chain)
    assert len(ssd.tier.index) > held_while_full
    ssd.tier.close()


async def test_io_errors_are_misses_and_open_the_breaker(store: Store, folder: Path) -> None:
    """T31: EIO."""
    ssd, chain = Ssd(folder, store), Chain(6)
    await ssd.put(chain)
    ssd.disk.read_error = errno.EIO
    for index in range(3):
        assert await ssd.get(chain, index) is None
    assert (ssd.counts["kv_ssd_io_faults"], ssd.counts["kv_ssd_breaker_opened"]) == (3, 1)
    ssd.disk.read_error = None
    assert await ssd.get(chain, 0) is None  # left alone
    store.clock.now_s += 6
    assert await ssd.num_readable(chain) == 6
    ssd.disk.write_error = errno.EIO
    other = Chain(3, first_token=500)
    assert await ssd.put(other) == 0
    ssd.disk.write_error = None
    store.clock.now_s += 6
    assert await ssd.put(other) == 3
    ssd.tier.check_integrity()
    ssd.tier.close()


async def test_a_hanging_disk_is_given_up_at_the_deadline(store: Store, folder: Path) -> None:
    """T31: nobody waits for it, no memory that it may still write to is used, and it is used again when it is well."""
    ssd, chain = Ssd(folder, store, deadline_s=0.01), Chain(6)
    await ssd.put(chain)
    ssd.disk.going_on.clear()
    reads = [asyncio.create_task(ssd.get(chain, index)) for index in range(4)]
    while ssd.counts["kv_ssd_deadline_faults"] < 4:  # all of them, not only as many as open the breaker
        await asyncio.sleep(0.001)
    assert ssd.counts["kv_ssd_breaker_opened"]
    assert not any(read.done() for read in reads)  # the disk may still write into their buffers
    assert await ssd.get(chain, 4) is None  # at once: left alone
    ssd.disk.going_on.set()
    assert await asyncio.gather(*reads) == [None] * 4
    store.clock.now_s += 6
    assert await ssd.num_readable(chain) == 6
    assert all(block.num_holds == 0 for block in ssd.tier.index.blocks.values())
    ssd.tier.close()


@pytest.mark.parametrize("case", ["symlink", "world-writable", "file", "slab is a link", "journal readable by all", "hard link", "in use"])
def test_a_folder_that_is_not_ours_is_refused_and_the_store_serves_without(store: Store, folder: Path, case: str) -> None:
    """T32."""
    folder.mkdir(mode=0o700)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    holder: Ssd | None = None
    if case == "symlink":
        folder.rmdir()
        folder.symlink_to(elsewhere)
    elif case == "world-writable":
        folder.chmod(0o777)
    elif case == "file":
        folder.rmdir()
        folder.write_bytes(b"")
    elif case == "slab is a link":
        (elsewhere / "victim").write_bytes(b"precious")
        (folder / SLAB).symlink_to(elsewhere / "victim")
    elif case == "journal readable by all":
        (folder / JOURNAL).write_bytes(b"")
        (folder / JOURNAL).chmod(0o644)
    elif case == "hard link":
        (elsewhere / "victim").touch(0o600)
        os.link(elsewhere / "victim", folder / SLAB)
    else:
        holder = Ssd(folder, store)
    with pytest.raises(EnvironmentFault):
        Ssd(folder, store)
    counts: dict[str, int] = {}
    config = KvStoreConfig(kv_dir=store.directory / "other", kv_dram=2**20, kv_ssd=f"{folder}:1M")
    config.kv_dir.mkdir()
    served, _, _ = open_store(config, store.clock, lambda name, amount: counts.update({name: amount}))
    assert served.lower == [] and counts == {"kv_tier_refused": 1}
    served.dram.close()
    if case == "slab is a link":
        assert (elsewhere / "victim").read_bytes() == b"precious"
    if holder is not None:
        holder.tier.close()


@pytest.mark.parametrize("value", ["nowhere", "/x:much", ":1G", "/x:1K"])
def test_settings_that_make_no_sense_are_named(tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match="SS_KV_SSD"):
        _ = KvStoreConfig(kv_dir=tmp_path, kv_ssd=value).ssd
    with pytest.raises(ConfigError, match=r"SS_KV_POLICY.*there are lru"):
        open_store(KvStoreConfig(kv_dir=tmp_path, kv_policy="belady"), lambda: 0.0, lambda name, amount: None)


async def test_another_models_blocks_are_never_loaded(store: Store, folder: Path) -> None:
    """T33: same tokens, same folder, another model digest (weights, dtype, layout, format all enter it)."""
    ssd, chain = Ssd(folder, store), Chain(3)
    await ssd.put(chain)
    assert ssd.block(chain, 0, model=b"o" * 32) is None
    assert ssd.tier.drop_model(ssd.tier.models()[0]) == 3
    assert ssd.tier.models() == [] and ssd.tier.segments.classes == {}
    ssd.tier.close()
