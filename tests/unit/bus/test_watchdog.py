from __future__ import annotations

import asyncio

import pytest

from shared.bus import watchdog
from shared.bus.watchdog import Watchdog
from tests.support.waiting import until


class Link:
    """A link whose answers the test gives."""

    def __init__(self) -> None:
        self.is_up = True
        self.answers = True
        self.num_pings = self.num_heard = self.num_cut = 0

    async def ping(self) -> float:
        self.num_pings += 1
        if not self.answers:
            await asyncio.Event().wait()
        return 0.001

    def heard(self) -> None:
        self.num_heard += 1

    async def cut(self) -> None:
        self.num_cut += 1
        self.is_up = False


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PING_S", 0.005)
    monkeypatch.setattr(watchdog, "DEAF_S", 0.02)


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def dog(link: Link) -> Watchdog:
    return Watchdog(link.ping, lambda: link.is_up, link.heard, link.cut)


async def test_a_link_that_answers_is_left_alone(link: Link, dog: Watchdog) -> None:
    dog.start()
    await until(lambda: link.num_heard >= 5)
    await dog.stop()
    assert link.num_cut == 0


async def test_a_deaf_link_is_cut_once(link: Link, dog: Watchdog) -> None:
    link.answers = False
    dog.start()
    await until(lambda: link.num_cut)
    await asyncio.sleep(0.05)
    assert link.num_cut == 1
    link.is_up = link.answers = True
    dog.forget()
    await until(lambda: link.num_heard >= 2)
    await dog.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_ping_that_fails_counts_as_deaf(link: Link) -> None:
    async def fail() -> float:
        raise ConnectionError("gone")

    dog = Watchdog(fail, lambda: link.is_up, link.heard, link.cut)
    dog.start()
    await until(lambda: link.num_cut)
    await dog.stop()


async def test_nothing_is_asked_while_the_link_is_down(link: Link, dog: Watchdog) -> None:
    link.is_up = False
    dog.start()
    await asyncio.sleep(0.05)
    await dog.stop()
    await dog.stop()
    assert link.num_pings == 0


async def test_a_ping_that_was_under_way_when_the_link_was_made_anew_neither_cuts_it_nor_ends_the_watch(link: Link, dog: Watchdog) -> None:
    link.answers = False
    dog.start()
    await until(lambda: link.num_pings == 1)
    link.answers = True
    dog.forget()
    await until(lambda: link.num_heard >= 2)
    await dog.stop()
    assert link.num_cut == 0


async def test_it_outlives_a_round_that_fails(link: Link, caplog: pytest.LogCaptureFixture) -> None:
    def heard() -> None:
        link.heard()
        if link.num_heard == 1:
            raise RuntimeError("a bug")

    dog = Watchdog(link.ping, lambda: link.is_up, heard, link.cut)
    dog.start()
    await until(lambda: link.num_heard >= 3)
    await dog.stop()
    assert "a round of the NATS watchdog failed" in caplog.text
