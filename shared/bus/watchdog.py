"""Finds out within seconds that a server does not answer, whatever state the client library believes in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

PING_S = 0.5
"""How often the server is asked for a sign of life."""
DEAF_S = 2.0
"""Without an answer for so long the connection is cut and made anew."""


class Watchdog:
    """Pings while `is_connected`: `heard` is called for each answer, `deaf` after DEAF_S without one."""

    def __init__(
        self,
        ping: Callable[[], Awaitable[float]],
        is_connected: Callable[[], bool],
        heard: Callable[[], None],
        deaf: Callable[[], Awaitable[None]],
    ) -> None:
        self._ping = ping
        self._is_connected = is_connected
        self._heard = heard
        self._deaf = deaf
        self._unanswered: set[asyncio.Future[float]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="nats watchdog")

    async def stop(self) -> None:
        """Idempotent."""
        self.forget()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def forget(self) -> None:
        """The connection is new (or closed): no answer to an old ping can come any more."""
        for pong in self._unanswered:
            pong.cancel()
        self._unanswered.clear()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if self._is_connected():
                try:
                    await self._round()
                except Exception:  # without a watchdog the link clock stands still, and nobody would ever be found dead
                    log.exception("a round of the NATS watchdog failed")

    async def _round(self) -> None:
        pong = asyncio.ensure_future(self._ping())
        self._unanswered.add(pong)  # never cancelled on a live link: nats-py's read loop dies of an answer to a cancelled ping
        done, _ = await asyncio.wait({pong}, timeout=DEAF_S)
        if pong.cancelled():
            return  # by `forget`: the link that was asked is gone, and its follower not to blame
        if done:
            self._unanswered.discard(pong)
            if pong.exception() is None:
                self._heard()
                return
        if self._is_connected():
            await self._deaf()
