"""When requests come. Open loop: the next one does not wait for the last one's answer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def uniform(rate_per_s: float, duration_s: float) -> Iterator[float]:
    """Evenly spaced moments, in seconds from the start."""
    for index in range(int(rate_per_s * duration_s)):
        yield index / rate_per_s


def poisson(rate_per_s: float, duration_s: float, rng: random.Random) -> Iterator[float]:
    """Independent arrivals."""
    return bursty(rate_per_s, duration_s, 1.0, rng)


def bursty(rate_per_s: float, duration_s: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Gamma-distributed gaps: coefficient of variation `burstiness` (1 is Poisson; above, clumps; below, more even)."""
    shape = 1 / burstiness**2
    scale = 1 / (rate_per_s * shape)
    moment_s = rng.gammavariate(shape, scale)
    while moment_s < duration_s:
        yield moment_s
        moment_s += rng.gammavariate(shape, scale)


async def open_loop(
    moments_s: Iterable[float],
    send: Callable[[int], Awaitable[T]],
    *,
    now_s: Callable[[], float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[T]:
    """Call `send(index)` at each moment, whatever has become of the earlier ones. Returns all results, in order of sending."""
    started_s = now_s()
    tasks: list[asyncio.Task[T]] = []
    try:
        for index, moment_s in enumerate(moments_s):
            wait_s = started_s + moment_s - now_s()
            if wait_s > 0:
                await sleep(wait_s)
            tasks.append(asyncio.ensure_future(_as_coroutine(send(index))))
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def closed_loop(num_requests: int, concurrency: int, send: Callable[[int], Awaitable[T]]) -> list[T]:
    """`num_requests` in all, `concurrency` at any time: each one's end starts the next."""
    indices = iter(range(num_requests))
    results: dict[int, T] = {}

    async def one_stream() -> None:
        for index in indices:
            results[index] = await send(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one_stream())
    return [results[index] for index in range(num_requests)]


async def _as_coroutine(work: Awaitable[T]) -> T:
    return await work
