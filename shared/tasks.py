"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

AGAIN_S = 0.05
LIMIT_S = 5.0

log = logging.getLogger(__name__)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], limit_s: float = LIMIT_S) -> None:
    """Cancel `tasks` and wait until they have ended; what they raise is theirs. The caller's own task is left out.

    A cancellation can get lost (asyncio.wait_for of Python 3.11 swallows one that arrives together with its result), so it is repeated.
    A task that does not end within `limit_s` is named in the log and left behind.
    """
    pending = {task for task in tasks if task is not asyncio.current_task() and not task.done()}
    for _ in range(max(int(limit_s / AGAIN_S), 1)):
        if not pending:
            return
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
    if pending:
        log.warning("not ended within %g s: %s", limit_s, ", ".join(sorted(task.get_name() for task in pending)))
