"""Conversions happen once and whole, whatever the disk, other processes and older versions do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.engine.model import model_cache
from shared.engine.model.digests import FileDigests, hash_file
from shared.engine.model.loader import ModelFolder, list_models, resolve_model, verify_model
from shared.errors import ModelFault


def ignore(text: str, fraction: float | None) -> None:
    """Reports go nowhere."""


def left_over(cache_dir: Path) -> list[str]:
    """Names in the cache of models, locks aside."""
    return [path.name for path in (cache_dir / "models").glob("*") if path.suffix != ".lock"]


def test_the_bundled_model_converts_to_what_the_cache_holds(smollm2_folder: ModelFolder, cache_dir: Path) -> None:
    """Also: a change of the converter that changes its result must come with a new FORMAT."""
    reports: list[float] = []
    folder = resolve_model("smollm2-135m", cache_dir, lambda text, fraction: reports.append(fraction or 0.0))
    assert folder.name == "smollm2-135m"
    assert folder.weights_digest == smollm2_folder.weights_digest
    assert folder.tokenizer_digest == smollm2_folder.tokenizer_digest
    assert (folder.vocab_size, folder.max_model_len, folder.architecture.num_layers) == (49152, 8192, 30)
    assert reports == sorted(reports)
    assert reports[-1] == 1.0
    shutil.rmtree(cache_dir)


def test_converting_happens_once(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(tiny), cache_dir, ignore)
    monkeypatch.setattr(model_cache, "write_weights", None)
    assert resolve_model(str(tiny), cache_dir, ignore) == first
    assert [manifest.name for manifest in list_models(cache_dir)] == ["My-Tiny-Model"]
    assert resolve_model("My-Tiny-Model", cache_dir, ignore).path == first.path


@pytest.mark.parametrize("damage", ["format", "truncated", "no manifest"])
def test_a_conversion_that_is_old_or_damaged_is_done_again(tiny: Path, cache_dir: Path, damage: str) -> None:
    first = resolve_model(str(tiny), cache_dir, ignore)
    manifest = first.path / "slipstream.json"
    if damage == "format":
        manifest.write_text(manifest.read_text().replace(f'"format": {model_cache.FORMAT}', '"format": 0'))
    elif damage == "truncated":
        os.truncate(first.path / "model.safetensors", 1000)
    else:
        manifest.unlink()
    assert resolve_model(str(tiny), cache_dir, ignore) == first
    assert verify_model(str(tiny), cache_dir, ignore) == first


def test_two_processes_convert_once(tiny: Path, cache_dir: Path) -> None:
    context = multiprocessing.get_context("fork")
    started: Any = context.Value("i", 0)

    def work() -> None:
        def count(text: str, fraction: float | None) -> None:
            if "once" in text:
                with started.get_lock():
                    started.value += 1

        resolve_model(str(tiny), cache_dir, count)

    processes = [context.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert started.value == 1


def test_what_a_killed_process_left_is_removed(tiny: Path, cache_dir: Path) -> None:
    partial = cache_dir / "models" / f".{hash_file(tiny)}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == [hash_file(tiny)]


def test_no_room_is_said_before_anything_is_written(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ModelFault, match=r"no room.*1 MiB are free") as fault:
        resolve_model(str(tiny), cache_dir, ignore)
    assert "SS_CACHE_DIR" in fault.value.remedy
    assert left_over(cache_dir) == []


@pytest.mark.parametrize(("code", "cause"), [(errno.ENOSPC, "no room"), (errno.EDQUOT, "no room"), (errno.EROFS, "cannot be written")])
def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int, cause: str
) -> None:
    def fail(*arguments: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelFault, match=cause):
        resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == []


def test_a_cache_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFault, match="cannot be written"):
        resolve_model(str(tiny), tmp_path / "file" / "cache", ignore)


def test_a_truncated_gguf_leaves_nothing(tiny: Path, cache_dir: Path) -> None:
    os.truncate(tiny, tiny.stat().st_size // 2)
    with pytest.raises(ModelFault, match="not a whole GGUF"):
        resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == []


def test_verify_finds_a_changed_byte_and_removes_the_conversion(tiny: Path, cache_dir: Path) -> None:
    folder = verify_model(str(tiny), cache_dir, ignore)
    with (folder.path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(ModelFault, match="have changed"):
        verify_model(str(tiny), cache_dir, ignore)
    assert verify_model(str(tiny), cache_dir, ignore) == folder


def test_a_changed_file_is_hashed_again(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digests = FileDigests(cache_dir)
    assert digests.known(path) is None
    assert digests.of(path) == digests.known(path) == hash_file(path)
    path.write_bytes(b"two, longer")
    assert digests.known(path) is None
    assert digests.of(path) == hash_file(path)
