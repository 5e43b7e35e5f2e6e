import random
from itertools import pairwise
from statistics import mean, pstdev

from loadtest.arrivals import bursty, closed_loop, open_loop, poisson, uniform


def test_rates_and_burstiness() -> None:
    assert list(uniform(4, 1)) == [0, 0.25, 0.5, 0.75]
    for burstiness in (0.5, 1.0, 3.0):
        moments = list(bursty(100, 200, burstiness, random.Random(1)))
        gaps = [after - before for before, after in pairwise(moments)]
        assert abs(len(moments) / 200 - 100) < 10
        assert abs(pstdev(gaps) / mean(gaps) - burstiness) < burstiness * 0.1


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert list(poisson(10, 5, random.Random(7))) == list(poisson(10, 5, random.Random(7)))


async def test_open_loop_does_not_wait_for_answers() -> None:
    clock, sent = [0.0], []

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    async def send(index: int) -> float:
        sent.append(clock[0])
        return clock[0]

    results = await open_loop([0.0, 1.0, 2.5], send, now_s=lambda: clock[0], sleep=sleep)
    assert len(results) == 3
    assert clock[0] == 2.5


async def test_closed_loop_keeps_its_concurrency_and_order() -> None:
    running, highest = 0, 0

    async def send(index: int) -> int:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await open_loop([], send, now_s=lambda: 0.0)
        running -= 1
        return index

    assert await closed_loop(10, 3, send) == list(range(10))
    assert 1 <= highest <= 3
