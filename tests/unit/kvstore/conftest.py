"""A store over a small arena in a folder on tmpfs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kvstore import Store


@pytest.fixture
def kv_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def store(kv_dir: Path) -> Iterator[Store]:
    made = Store(kv_dir)
    yield made
    made.store.check_integrity()
    made.close()
