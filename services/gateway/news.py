"""How streams hear that there is something new for their clients: each event costs a task's turn and a write, so many go in one round."""

from __future__ import annotations

import asyncio
import time

REST = 2.0
"""Between two rounds, in lengths of the last one."""


class News:
    """Wakes the one task that waits for it. An `asyncio.Event` is for many, and costs three times as much for every token."""

    def __init__(self) -> None:
        self.is_due = False
        """A round will tell it."""
        self._is_told = False
        self._waiter: asyncio.Future[None] | None = None

    def tell(self) -> None:
        self._is_told = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until there are some that came since the last time."""
        if not self._is_told:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_told = False


class Rounds:
    """Tells all that is due at once, then rests: all streams together have a third of the loop's time. Whoever is not behind notices
    nothing, as the next token comes later than that; whoever is behind sends tokens together until it has caught up."""

    def __init__(self) -> None:
        self._due: list[News] = []
        self._began_s = 0.0
        self._is_resting = False

    def add(self, news: News) -> None:
        """To be told in the next round."""
        if news.is_due:
            return
        news.is_due = True
        self._due.append(news)
        if len(self._due) == 1 and not self._is_resting:
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_resting = bool(self._due)
        due, self._due = self._due, []
        if not due:
            return
        self._began_s = time.monotonic()
        for news in due:
            news.is_due = False
            news.tell()
        asyncio.get_running_loop().call_soon(self._rest)  # behind all tasks that were woken

    def _rest(self) -> None:
        asyncio.get_running_loop().call_later(REST * (time.monotonic() - self._began_s), self._begin)
