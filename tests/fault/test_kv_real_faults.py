"""Faults that the kernel itself makes: a tmpfs that is full (T30), system calls that fail or stand still (T31)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = (sys.executable, "-m", "tests.support.kv_real_faults")

pytestmark = pytest.mark.timeout(120)


def told(command: list[str], **environ: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_full_tmpfs_stops_growth_and_nothing_else(tmp_path: Path) -> None:
    """Mounted in a namespace of its own, which needs no rights and leaves nothing behind."""
    mounted = f'mount -t tmpfs -o size=12m tmpfs "{tmp_path}" && exec "$@"'
    answer = told(["unshare", "-Urm", "sh", "-c", mounted, "sh", *PROGRAM, "small", str(tmp_path)])
    assert 0 < answer["held_while_full"] < answer["held_after"]
    assert answer["newest_readable"] == 8, "the newest have taken the places of the oldest"
    assert answer["io_faults"] == 0


def test_failing_and_hanging_system_calls_are_misses(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler makes the faults: apt-get install gcc"
    library, faults = tmp_path / "faulty_disk.so", tmp_path / "faults"
    source = ROOT / "tests/support/faulty_disk.c"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    faults.mkdir()
    answer = told([*PROGRAM, "broken", str(tmp_path)], LD_PRELOAD=str(library), FAULTS=str(faults))
    assert (answer["put"], answer["readable"]) == (8, 8)
    assert (answer["read_while_broken"], answer["breaker"]) == ([True] * 3, 1)
    assert answer["readable_again"] == 8
    assert answer["put_while_broken"] == 0
    assert answer["put_again"] > 0
    assert answer["while_hanging"]
    assert answer["after_hanging"].count(True) >= 3, "who was given up gets nothing; who waited less may get its block"
    assert answer["readable_at_last"] == 8
