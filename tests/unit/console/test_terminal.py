import io

import pytest

from services.console.terminal import (
    MASK,
    Terminal,
    age_text,
    clip,
    counted,
    folded,
    narrowed,
    share_text,
    shortened,
    table,
    without_login,
)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "environ", "has_colour", "is_live"),
    [
        (Screen(), {}, True, True),
        (Screen(), {"NO_COLOR": "1"}, False, True),
        (Screen(), {"NO_COLOR": ""}, True, True),
        (Screen(), {"TERM": "dumb"}, False, False),
        (io.StringIO(), {}, False, False),
    ],
)
def test_colours_need_a_terminal_that_wants_them(stream: io.StringIO, environ: dict[str, str], has_colour: bool, is_live: bool) -> None:
    terminal = Terminal(stream, environ)
    assert (terminal.has_colour, terminal.is_live) == (has_colour, is_live)
    assert ("\x1b" in terminal.paint("x", "red")) is has_colour
    assert "\x1b" not in terminal.paint("", "red"), "nothing is not painted"


def test_a_line_is_cut_where_it_is_seen_to_end() -> None:
    painted = "ab\x1b[31mcdef\x1b[0mgh"
    assert clip("abcdef", 4) == "abcd" and clip("abcdef", 6) == "abcdef"
    assert clip(painted, 8) == painted
    assert clip(painted, 4) == "ab\x1b[31mcd\x1b[0m"
    assert clip(painted, 7) == "ab\x1b[31mcdef\x1b[0mg\x1b[0m"


def test_shares() -> None:
    assert [share_text(share) for share in (0, 0.001, 0.006, 0.5, 1)] == ["0%", "<1%", "1%", "50%", "100%"]


def test_logins_are_masked_wherever_they_stand() -> None:
    assert without_login("to nats://a:b@h:1 and http://h") == f"to nats://{MASK}@h:1 and http://h"


def test_a_table_that_is_too_wide_goes_without_what_matters_least() -> None:
    rows = [("name", "id", "model", "load"), ("decode-0", "12345678", "smollm2", "3")]
    assert narrowed(rows, 80, ("id", "model")) == table(rows)
    assert narrowed(rows, 30, ("id", "model")) == ["name      model    load", "decode-0  smollm2  3"]
    assert narrowed(rows, 3, ("id", "model")) == ["name      load", "decode-0  3"], "what is left is shown all the same"


def test_named_columns_stand_to_the_right_and_keep_their_width() -> None:
    assert table([("name", "run"), ("decode-0", "3")], {"run": 5}) == ["name        run", "decode-0      3"]
    assert table([("name", "run"), ("decode-0", "300,000")], {"run": 5}) == ["name          run", "decode-0  300,000"]


def test_what_a_kind_of_row_has_not_is_not_left_out() -> None:
    assert narrowed([("name", "id"), ("router", "12345678")], 5, ("model",)) == ["name    id", "router  12345678"]


def test_a_text_that_is_cut_says_so() -> None:
    assert (shortened("nats://host:4222", 16), shortened("nats://host:4222", 9)) == ("nats://host:4222", "nats://h…")


def test_numbers_with_their_nouns() -> None:
    assert [counted(number, "block") for number in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]


def test_ages_are_whole_units_that_have_passed() -> None:
    assert [age_text(seconds) for seconds in (-1, 59.9, 119, 7199, 172_799)] == ["0s", "59s", "1m", "1h", "1d"]


def test_text_is_broken_at_blanks_only() -> None:
    assert folded("one two-three four", 9, 2) == ["one", "  two-three", "  four"]
    assert folded("short", 80) == ["short"] and folded("", 80) == [""]
