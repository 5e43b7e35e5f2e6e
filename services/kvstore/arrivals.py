"""Who waits for which block."""

from __future__ import annotations

import asyncio


class Arrivals:
    """Waiting for a key until it is here, or will not come, or the time is up."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, set[asyncio.Future[None]]] = {}

    def arrived(self, key: bytes) -> None:
        """Wake whoever waits for `key`."""
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, key: bytes, timeout_s: float) -> bool:
        """False: the time is up."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
                return True
        except TimeoutError:
            return False
        finally:
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]
