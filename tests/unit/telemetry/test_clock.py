import logging

import pytest

from shared.telemetry.clock import COMPLAIN_EVERY_S, SKEW_S, ClockCheck


class Clocks:
    """This machine's two."""

    wall_s = 5000.0
    real_s = 7.0


def check() -> tuple[ClockCheck, Clocks]:
    clocks = Clocks()
    return ClockCheck(lambda: clocks.wall_s, lambda: clocks.real_s), clocks


@pytest.mark.parametrize(
    ("theirs", "says"), [(5000.0 - 90, "90 s ahead of that of 10.0.0.9"), (5000.0 + 90, "90 s behind that of 10.0.0.9")]
)
def test_a_clock_that_differs_is_said_with_a_remedy(theirs: float, says: str, caplog: pytest.LogCaptureFixture) -> None:
    check()[0].asked(repr(theirs), "10.0.0.9")
    [record] = caplog.records
    assert record.levelno == logging.WARNING and says in record.getMessage()
    assert "chronyc" in record.__dict__["remedy"]


@pytest.mark.parametrize("at", ["", "noon", "nan", "inf", repr(5000.0), repr(5000.0 - SKEW_S + 0.1)])
def test_what_is_no_skew(at: str, caplog: pytest.LogCaptureFixture) -> None:
    check()[0].asked(at, "10.0.0.9")
    assert caplog.records == []


def test_it_is_not_said_at_every_scrape(caplog: pytest.LogCaptureFixture) -> None:
    checked, clocks = check()
    for _ in range(3):
        checked.asked("0", "10.0.0.9")
    assert len(caplog.records) == 1
    clocks.real_s += COMPLAIN_EVERY_S
    checked.asked("0", "10.0.0.9")
    assert len(caplog.records) == 2
