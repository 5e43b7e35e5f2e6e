"""The journal on a disk that becomes full: what is told is there after a restart, what was refused leaves no trace."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.kvstore.tiers.journal import JOURNAL, BlockGone, Geometry, Journal


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """As a full disk does it: the kernel takes what still fits, and refuses when it is asked again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def replayed(folder: Path) -> list[object]:
    journal = Journal(folder)
    records: list[object] = list(journal.replay())
    journal.close()
    return records


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path)
    list(made.replay())
    made.append([Geometry(4096)])
    yield made
    made.close()


def test_records_that_do_not_fit_leave_no_half_record_behind(journal: Journal, tmp_path: Path) -> None:
    size, records = (tmp_path / JOURNAL).stat().st_size, [BlockGone(number) for number in range(100)]
    with file_size_limit(size + 50), pytest.raises(OSError):
        journal.append(records)
    assert (tmp_path / JOURNAL).stat().st_size == size
    journal.append(records[:3])
    journal.close()
    assert replayed(tmp_path) == [Geometry(4096), *records[:3]]


def test_a_rewrite_that_does_not_fit_leaves_the_old_one(journal: Journal, tmp_path: Path) -> None:
    journal.append([BlockGone(1)])
    with file_size_limit(60), pytest.raises(OSError):
        journal.rewrite([Geometry(4096), *(BlockGone(number) for number in range(100))])
    journal.append([BlockGone(2)])
    journal.close()
    assert replayed(tmp_path) == [Geometry(4096), BlockGone(1), BlockGone(2)]
