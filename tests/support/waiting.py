"""Waiting for what another task or process does, bounded by the test's own time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object]) -> None:
    """Returns when `condition` holds."""
    while not condition():
        await asyncio.sleep(0.005)


async def until_true(ask: Callable[[], Awaitable[object]]) -> None:
    """The same of what must be asked for."""
    while not await ask():
        await asyncio.sleep(0.005)
