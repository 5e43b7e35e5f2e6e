"""A window forgets by age, and is honest about what it covers."""

from services.planner.window import Window
from tests.support.leases import Clock


def test_it_forgets_what_is_too_old() -> None:
    clock = Clock()
    window: Window[int] = Window(clock, 10.0)
    for number in range(5):
        window.add(number)
        clock.advance(4)
    assert list(window) == [3, 4]
    assert len(window) == 2
    clock.advance(100)
    assert list(window) == []


def test_a_young_window_covers_its_age() -> None:
    clock = Clock()
    window: Window[int] = Window(clock, 10.0)
    assert window.covered_s > 0
    clock.advance(4)
    assert window.covered_s == 4
    clock.advance(40)
    assert window.covered_s == 10


def test_a_full_window_covers_less_time() -> None:
    clock = Clock()
    window: Window[int] = Window(clock, 10.0, max_items=5)
    for number in range(20):
        clock.advance(1)
        window.add(number)
    assert list(window) == [15, 16, 17, 18, 19]
    assert window.covered_s == 5


def test_an_item_may_become_too_old_while_a_list_is_made() -> None:
    """list() takes the iterator first and then asks for the length."""
    now_s = [0.0]

    def running_clock() -> float:
        now_s[0] += 0.1
        return now_s[0]

    window: Window[int] = Window(running_clock, 10.0)
    for number in range(100):
        window.add(number)
    for _ in range(100):
        items = list(window)
        assert items == sorted(items)
