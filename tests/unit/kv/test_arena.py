"""The arena file: made once, found again, refused when it is not ours."""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

from shared.errors import EnvironmentFault
from shared.kv import arena as arena_module
from shared.kv import slot
from shared.kv.arena import ARENA, Extent, StoreLock, create_arena, open_arena
from shared.kv.slot_writer import WriterLock, is_writer_gone


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def test_workers_see_the_stores_header_and_each_others_bytes(directory: Path) -> None:
    ours = create_arena(directory, 2**20, "0123abcd")
    ours.start_epoch(7)
    theirs = open_arena(directory)
    assert (theirs.host, theirs.epoch, theirs.num_bytes) == ("0123abcd", 7, 2**20)
    ours.memory[ours.segment_at(0)] = 42
    assert theirs.memory[theirs.segment_at(0)] == 42
    assert theirs.segment_at(theirs.num_segments - 1) + theirs.segment_bytes <= theirs.num_bytes
    ours.close()
    theirs.close()
    theirs.close()


def test_mapping_leaves_the_interpreter_to_other_threads(directory: Path) -> None:
    create_arena(directory, 2**20, "0123abcd").close()
    file = directory / ARENA
    header = bytearray(file.read_bytes()[:4096])
    num_bytes = 256 * 2**20
    struct.pack_into("<Q", header, header.index(struct.pack("<Q", 2**20)), num_bytes)
    file.write_bytes(header)
    os.truncate(file, num_bytes)  # no page of it is there
    turns, is_mapped = 0, Event()

    def turn() -> None:
        nonlocal turns
        while not is_mapped.wait(0.001):
            turns += 1

    other = Thread(target=turn)
    other.start()
    before = turns
    arena = open_arena(directory)
    during = turns - before
    is_mapped.set()
    other.join()
    assert file.stat().st_blocks * 512 >= num_bytes, "every page is there"
    arena.close()
    assert during > 3


def test_a_kernel_that_cannot_be_asked_for_pages(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_arena(directory, 2**20, "0123abcd").close()
    os.truncate(directory / ARENA, 4096)
    os.truncate(directory / ARENA, 2**20)
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_READ", 9999)
    open_arena(directory).close()
    assert (directory / ARENA).stat().st_blocks * 512 >= 2**20


def test_the_segment_table_remembers_extents(directory: Path) -> None:
    arena = create_arena(directory, 2**20, "0123abcd")
    extent = Extent(3, 2, "00112233445566aa", 4096)
    arena.save_extent(extent, in_use=True)
    assert open_and_close(directory) == [extent]
    arena.save_extent(extent, in_use=False)
    assert open_and_close(directory) == []
    arena.close()


def open_and_close(directory: Path) -> list[Extent]:
    arena = open_arena(directory)
    extents = arena.extents()
    arena.close()
    return extents


def test_a_second_arena_in_the_same_folder_is_refused(directory: Path) -> None:
    create_arena(directory, 2**20, "0123abcd").close()
    with pytest.raises(EnvironmentFault, match="exists already"):
        create_arena(directory, 2**20, "0123abcd")


def test_no_room_is_one_line_with_a_remedy_and_leaves_nothing(directory: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"needs 1073741824 MiB in .*, \d+ MiB are free") as fault:
        create_arena(directory, 2**50, "0123abcd")
    assert "SS_KV_DRAM" in fault.value.remedy
    assert not (directory / ARENA).exists()


def test_too_small_an_arena_is_refused(directory: Path) -> None:
    with pytest.raises(EnvironmentFault, match="too small"):
        create_arena(directory, 4096, "0123abcd")


@pytest.mark.parametrize("damage", ["absent", "symlink", "writable", "truncated", "version", "empty"])
def test_what_is_not_our_arena_is_refused(directory: Path, damage: str) -> None:
    path = directory / ARENA
    create_arena(directory, 2**20, "0123abcd").close()
    if damage == "absent":
        path.unlink()
    elif damage == "symlink":
        path.rename(directory / "elsewhere")
        path.symlink_to(directory / "elsewhere")
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "truncated":
        os.truncate(path, 2**19)
    elif damage == "version":
        with path.open("r+b") as file:
            file.seek(8)
            file.write(b"\xff")
    else:
        os.truncate(path, 0)
    with pytest.raises(EnvironmentFault):
        open_arena(directory)


def test_one_store_a_folder_and_only_in_a_private_one(directory: Path) -> None:
    lock = StoreLock(directory)
    with pytest.raises(EnvironmentFault, match="another kvstore"):
        StoreLock(directory)
    lock.close()
    StoreLock(directory).close()
    directory.chmod(0o777)
    with pytest.raises(EnvironmentFault, match="only we can write"):
        StoreLock(directory)
    directory.chmod(0o700)


def test_a_writer_is_gone_when_its_lock_is_free(directory: Path) -> None:
    assert is_writer_gone(directory, "aaaaaaaa") is True
    lock = WriterLock(directory, "aaaaaaaa")
    assert is_writer_gone(directory, "aaaaaaaa") is False
    os.close(lock._fd)  # as at its death: the kernel closes the descriptor, the file stays
    assert is_writer_gone(directory, "aaaaaaaa") is True
    assert not (directory / "writers" / "aaaaaaaa").exists()


def test_a_slot_header_survives_the_round_trip_and_notices_a_flip() -> None:
    memory = memoryview(bytearray(8192))
    slot.write_owner(memory, 0, 9, writer="aaaaaaaa", tenant="t" * 16, digest=b"d" * 32, parent=b"p" * 32, model_digest=b"m" * 32)
    slot.write_content(memory, 0, writer="aaaaaaaa", packed_tokens=bytes(range(16)), payload_format="native", length=64, checksum=5)
    slot.seal(memory, 0)
    slot.write_state(memory, 0, 9, slot.SlotState.COMMITTED)
    header = slot.read_header(memory, 0)
    assert header[:9] == (9, slot.SlotState.COMMITTED, 4, "aaaaaaaa", "native", 64, 5, "t" * 16, b"d" * 32)
    assert bytes(slot.tokens(memory, 0)) == bytes(range(16))
    assert slot.is_sealed(memory, 0)
    for at in (*range(12, 168), *range(256, 272)):
        memory[at] ^= 4
        assert not slot.is_sealed(memory, 0), at
        memory[at] ^= 4
    assert slot.is_sealed(memory, 0)
