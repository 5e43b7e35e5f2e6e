"""A tiny GGUF file and an empty cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import TinyGguf


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return TinyGguf().write(tmp_path / "My Tiny+Model.gguf")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"
