"""Blocking work beside the event loop, that Ctrl-C need not wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that does not keep the process alive (asyncio's own executor is waited for at exit)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def hand_over(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # whatever it is, it belongs to the one who waits
            caught = error
            loop.call_soon_threadsafe(hand_over, lambda: future.set_exception(caught))
        else:
            loop.call_soon_threadsafe(hand_over, lambda: future.set_result(result))

    threading.Thread(target=run, daemon=True, name="console-work").start()
    return await future
