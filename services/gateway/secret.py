"""The cluster secret: 32 random bytes in a 0600 file, made once by whoever comes first."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from shared.errors import EnvironmentFault

NUM_BYTES = 32


def cluster_secret(path: Path) -> bytes:
    """Read it, or make it. Raises EnvironmentFault if others could read it, or if it is too short to be one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            _create(path)
        if path.stat().st_mode & 0o077:
            raise EnvironmentFault(f"{path} can be read by others", remedy=f"chmod 600 {path}")
        text = path.read_bytes().strip()
    except OSError as error:
        raise EnvironmentFault(f"{path}: {error.strerror}", remedy="Set SS_CLUSTER_SECRET_FILE") from error
    if len(text) < NUM_BYTES:
        raise EnvironmentFault(f"{path} holds less than {NUM_BYTES} bytes", remedy="Delete it: it is made anew")
    return text


def _create(path: Path) -> None:
    """Whole or not at all: written beside, then linked; a second creator finds the first one's."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_hex(NUM_BYTES).encode())
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
