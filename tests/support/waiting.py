"""Waiting for what another task or process does, bounded by the test's own time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object]) -> None:
    """Returns when `condition` holds."""
    while not condition():
        await asyncio.sleep(0.005)
