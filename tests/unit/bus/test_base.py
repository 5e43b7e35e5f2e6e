from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.base import LinkClock


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make(patience_s: float | None = None) -> tuple[Time, LinkClock]:
    time = Time()
    return time, LinkClock(time, grace_s=2.0, patience_s=patience_s)


def test_it_runs_while_the_link_is_up() -> None:
    time, clock = make()
    before = clock.now()
    time.now_s += 5
    assert clock.now() - before == 5


def test_it_stands_still_while_the_link_is_down_and_for_the_grace_period() -> None:
    time, clock = make()
    before = clock.now()
    clock.link_down()
    time.now_s += 30
    assert clock.now() == before
    clock.link_up()
    time.now_s += 1.9
    assert clock.now() == before
    time.now_s += 0.1 + 3
    assert round(clock.now() - before, 6) == 3


def test_a_loss_within_the_grace_period_extends_it() -> None:
    time, clock = make()
    before = clock.now()
    for _ in range(3):
        clock.link_down()
        time.now_s += 1
        clock.link_up()
        time.now_s += 1
    assert clock.now() == before
    time.now_s += 1 + 4
    assert round(clock.now() - before, 6) == 4


def test_it_stops_by_itself_when_nothing_is_heard() -> None:
    time, clock = make(patience_s=1.5)
    clock.heard()
    before = clock.now()
    time.now_s += 10  # a black hole, or this process was stopped
    assert clock.now() - before == 1.5
    clock.heard()
    time.now_s += 1
    clock.heard()
    assert clock.now() - before == 1.5
    time.now_s += 1 + 0.5
    clock.heard()
    assert round(clock.now() - before, 6) == 2.0


def test_silence_that_turns_out_to_be_a_loss() -> None:
    time, clock = make(patience_s=1.5)
    clock.heard()
    before = clock.now()
    time.now_s += 3
    clock.link_down()
    time.now_s += 10
    clock.link_up()
    time.now_s += 1.0
    assert clock.now() - before == 1.5
    clock.heard()
    time.now_s += 1.25
    assert round(clock.now() - before, 6) == 1.75


def test_before_the_first_answer_silence_means_nothing() -> None:
    time, clock = make(patience_s=1.5)
    before = clock.now()
    time.now_s += 10
    assert clock.now() - before == 10


@given(st.lists(st.tuples(st.sampled_from(["wait", "down", "up", "heard", "now"]), st.floats(0.0, 4.0)), max_size=60))
@settings(deadline=None)
def test_it_never_goes_back_and_is_never_faster_than_time(steps: list[tuple[str, float]]) -> None:
    time, clock = make(patience_s=1.5)
    last, begun_s = clock.now(), time.now_s
    first = last
    for step, seconds in steps:
        time.now_s += seconds
        {"wait": lambda: None, "down": clock.link_down, "up": clock.link_up, "heard": clock.heard, "now": clock.now}[step]()
        now = clock.now()
        assert now >= last - 1e-9
        assert now - first <= time.now_s - begun_s + 1e-9
        last = now
