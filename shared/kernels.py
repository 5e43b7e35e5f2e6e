"""Small C kernels, compiled by the system's compiler for this very CPU at first use and kept in the cache directory.

A kernel is a speed-up, never a need: where there is no compiler, `load_kernel` returns None, logs why once, and the caller goes on with its
numpy or torch reference (and counts that it does). Each kernel and its reference pass one test suite.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)

FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-shared", "-fPIC", "-std=gnu11")
"""Nothing that changes a result: a kernel and its reference agree to the last bit unless it asks for more."""

_COMPILE_TIMEOUT_S = 120

absent: set[str] = set()
"""Sources of the kernels that this process goes without, for whoever counts that."""


def kernel_dir() -> Path:
    """Where compiled kernels are kept: `SS_CACHE_DIR/kernels`, made private (0700) because its files are loaded as code."""
    root = Path(os.environ.get("SS_CACHE_DIR", "~/.cache/slipstream")).expanduser()
    folder = root / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@cache
def load_kernel(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Compile `source` (once a source, flags and CPU) and load it; None, with a warning, if that is not possible here."""
    try:
        return ctypes.CDLL(str(_compiled(source, (*FLAGS, *flags))))
    except (OSError, subprocess.SubprocessError) as error:
        absent.add(source.name)
        log.warning("kernel %s is not available, the slower reference is used: %s", source.name, error)
        return None


def _compiled(source: Path, flags: tuple[str, ...]) -> Path:
    text = source.read_bytes()
    name = hashlib.sha256(b"\0".join([text, " ".join(flags).encode(), _cpu().encode()])).hexdigest()[:24]
    for folder in (source.parent, kernel_dir()):
        shared_object = folder / f"{source.stem}-{name}.so"
        if shared_object.is_file() and _is_ours(shared_object):
            return shared_object
    return _compile(source, flags, kernel_dir() / f"{source.stem}-{name}.so")


def _compile(source: Path, flags: tuple[str, ...], target: Path) -> Path:
    """Into a temporary file, then renamed: two processes may compile at once, neither sees half a file."""
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc, gcc or clang) on the PATH")
    descriptor, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(descriptor)
    try:
        command = [compiler, *flags, "-o", temporary, str(source), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise OSError(f"{Path(compiler).name} failed: {done.stderr.strip()[:300]}")
        Path(temporary).rename(target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def _is_ours(path: Path) -> bool:
    """Loaded as code: only if it belongs to us or root, and nobody else may write it."""
    status = path.stat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        flags = platform.processor()
    return f"{platform.machine()} {flags}"
