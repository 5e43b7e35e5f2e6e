import io

from services.console.board import Board
from services.console.terminal import Terminal


class Screen(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(is_terminal: bool, **environ: str) -> tuple[Board, Screen, Clock]:
    screen, clock = Screen(is_terminal), Clock()
    return Board(Terminal(screen, environ), clock), screen, clock


def test_plain_lines_where_there_is_no_terminal() -> None:
    board, screen, clock = make(is_terminal=False)
    board.begin("decode-0", "starting")
    clock.now_s = 2.1
    board.progress("decode-0", "loading weights", 0.61)
    board.progress("decode-0", "loading weights", 0.62)
    board.progress("decode-0", "warming up")
    clock.now_s = 2.9
    board.done("decode-0", "256 blocks free")
    assert "\x1b" not in screen.getvalue()
    assert screen.getvalue().splitlines() == [
        "[  0.0s] decode-0 starting",
        "[  2.1s] decode-0 loading weights 61%",
        f"  ✔ decode-0   {'256 blocks free':<62}    2.9s",
    ]


def test_a_terminal_is_redrawn_in_place_and_never_wraps() -> None:
    board, screen, _ = make(is_terminal=True, NO_COLOR="1")
    board.begin("nats")
    board.begin("router")
    board.done("nats", "x" * 500)
    drawn = screen.getvalue().rpartition("\x1b[2A")[2]
    assert drawn.count("\n") == 2
    assert max(map(len, drawn.splitlines())) < 100
    assert "\x1b[3" not in drawn, "no colour with NO_COLOR"


def test_a_warning_stands_above_the_running_phases_and_stays() -> None:
    board, screen, _ = make(is_terminal=True)
    board.begin("nats")
    board.say("warning", "router  exited")
    last = screen.getvalue().rpartition("\x1b[1A\r\x1b[J")[2]
    assert "router  exited" in last
    assert last.index("router") < last.index("nats")


def test_a_phase_that_has_ended_says_nothing_more() -> None:
    board, screen, _ = make(is_terminal=False)
    board.begin("nats", "starting")
    board.failed("nats", "no JetStream")
    before = screen.getvalue()
    board.progress("nats", "late")
    assert screen.getvalue() == before
    assert "✘ nats" in before


def test_why_a_phase_failed_is_told_whole() -> None:
    cause = "127.0.0.1:8000 is in use by pid 4211 (python -m http.server 8000 --bind 127.0.0.1 --directory /srv/somewhere/deep)"
    for is_terminal in (False, True):
        board, screen, _ = make(is_terminal=is_terminal, NO_COLOR="1")
        board.begin("nats", "starting")
        board.failed("gateway", cause)
        board.close()
        assert cause.split() == [word for word in screen.getvalue().split("✘ gateway")[-1].split() if word != "0.0s" and "\x1b" not in word]


def test_close_drops_the_running_lines() -> None:
    board, screen, _ = make(is_terminal=True)
    board.begin("nats")
    board.done("nats", "ok")
    board.begin("router", "starting")
    board.close()
    assert "router" not in screen.getvalue().rpartition("\x1b[2A")[2]
