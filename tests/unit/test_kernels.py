"""Kernels compile once, load, and their absence is said, not fatal."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shared import kernels

SOURCE = "int twice(int x) { return 2 * x; }\n"


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernels, "absent", set())
    kernels.load_kernel.cache_clear()


def write(tmp_path: Path, text: str) -> Path:
    source = tmp_path / "twice.c"
    source.write_text(text)
    return source


def test_compiles_and_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path, SOURCE)
    library = kernels.load_kernel(source)
    assert library is not None
    assert library.twice(21) == 42
    [built] = kernels.kernel_dir().glob("*.so")
    before = built.stat().st_mtime_ns
    kernels.load_kernel.cache_clear()
    assert kernels.load_kernel(source) is not None
    assert built.stat().st_mtime_ns == before, "compiled twice"


def test_changed_source_is_compiled_again(tmp_path: Path) -> None:
    assert kernels.load_kernel(write(tmp_path, SOURCE)) is not None
    kernels.load_kernel.cache_clear()
    library = kernels.load_kernel(write(tmp_path, SOURCE.replace("2 *", "3 *")))
    assert library is not None
    assert library.twice(2) == 6


def test_no_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernel(write(tmp_path, SOURCE)) is None
    assert "no C compiler" in caplog.text
    assert kernels.absent == {"twice.c"}


def test_bad_source_is_said_and_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kernels.load_kernel(write(tmp_path, "int twice(")) is None
    assert "failed" in caplog.text
    assert not list(kernels.kernel_dir().iterdir())


def test_a_file_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    source = write(tmp_path, SOURCE)
    kernels.load_kernel(source)
    [built] = kernels.kernel_dir().glob("*.so")
    built.unlink()  # the one that is mapped must stay whole: the linker still runs its end
    built.write_bytes(b"not code")
    built.chmod(0o666)
    kernels.load_kernel.cache_clear()
    assert kernels.load_kernel(source) is not None, "compiled again instead of loading a foreign file"
    assert not built.stat().st_mode & 0o022
