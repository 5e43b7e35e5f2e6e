"""Rounds: whoever waits is told, nothing is lost, and between two rounds others run."""

from __future__ import annotations

import asyncio

from services.gateway.news import News, Rounds


async def test_news_that_came_before_somebody_waited_are_not_lost() -> None:
    news = News()
    news.tell()
    await news.wait()
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    assert not waiting.done(), "they were taken"
    news.tell()
    news.tell()
    await waiting


async def test_news_outlive_a_task_that_was_cancelled_while_it_waited() -> None:
    news = News()
    waiting = asyncio.create_task(news.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    news.tell()
    await news.wait()


async def test_every_stream_is_told_all_that_came_however_often_it_was_added() -> None:
    """What is added while a round rests is told in the next one, and several additions are told once."""
    rounds, streams = Rounds(), [News() for _ in range(8)]
    came, read, turns = [0] * 8, [0] * 8, [0] * 8

    async def follow(index: int) -> None:
        while read[index] < 300:
            await streams[index].wait()
            read[index], turns[index] = came[index], turns[index] + 1

    tasks = [asyncio.create_task(follow(index)) for index in range(8)]
    for number in range(300):
        for index in range(8):
            came[index] += 1
            rounds.add(streams[index])
        if number % 3 == 0:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert read == [300] * 8 and max(turns) < 300


async def test_a_round_that_nobody_waits_for_does_not_stop_the_next() -> None:
    rounds, lonely, other = Rounds(), News(), News()
    rounds.add(lonely)
    await asyncio.sleep(0.01)
    rounds.add(other)
    await other.wait()
    await lonely.wait()
