"""The phases of a start, a line each: redrawn in place on a terminal, printed as they change elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass

from services.console.terminal import Terminal, folded, shortened

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NAME_WIDTH = 11
_PLAIN_EVERY_S = 1.0


@dataclass
class _Phase:
    name: str
    started_s: float
    text: str = ""
    fraction: float | None = None
    state: str = "running"
    elapsed_s: float = 0.0
    printed_s: float = -_PLAIN_EVERY_S
    printed: str = ""


class Board:
    """Phases begin, report progress, and end done or failed, several at once. Nothing is printed after `close` but by the caller."""

    def __init__(self, terminal: Terminal, monotonic: Callable[[], float]) -> None:
        self._terminal = terminal
        self._monotonic = monotonic
        self._started_s = monotonic()
        self._phases: dict[str, _Phase] = {}
        self._num_drawn = 0
        self._frame = 0

    @property
    def elapsed_s(self) -> float:
        return self._monotonic() - self._started_s

    def begin(self, name: str, text: str = "") -> None:
        """A phase begins; again: begins anew on its old line."""
        self._phases[name] = _Phase(name, self._monotonic(), text)
        self._show(self._phases[name])

    def progress(self, name: str, text: str, fraction: float | None = None) -> None:
        """What the phase is at. A phase that has ended says nothing more."""
        phase = self._phases.get(name)
        if phase and phase.state == "running":
            phase.text, phase.fraction = text, fraction
            self._show(phase)

    def text(self, name: str) -> str:
        """What the phase said last."""
        return self._phases[name].text if name in self._phases else ""

    def done(self, name: str, detail: str) -> None:
        self._end(name, "done", detail)

    def failed(self, name: str, cause: str) -> None:
        self._end(name, "failed", cause)

    def tick(self) -> None:
        """Turn the spinners; call it ten times a second while phases run."""
        self._frame += 1
        self._draw()

    def say(self, kind: str, text: str) -> None:
        """A marked line of its own, above the phases that still run."""
        if self._num_drawn:
            self._terminal.stream.write(f"\x1b[{self._num_drawn}A\r\x1b[J")
            self._num_drawn = 0
        self._terminal.say(f"{self._terminal.mark(kind)} {text}")
        self._draw()

    def close(self) -> None:
        """Leave the lines as they are; running ones are dropped."""
        self._phases = {name: phase for name, phase in self._phases.items() if phase.state != "running"}
        self._draw()
        self._num_drawn = 0
        self._phases = {}

    def _end(self, name: str, state: str, text: str) -> None:
        phase = self._phases.setdefault(name, _Phase(name, self._monotonic()))
        phase.state, phase.text = state, text
        phase.elapsed_s = self._monotonic() - phase.started_s
        self._show(phase)

    def _show(self, phase: _Phase) -> None:
        if self._terminal.is_live:
            self._draw()
        elif phase.state != "running":
            for line in self._lines(phase, 120):
                self._terminal.say(line)
        elif phase.text and phase.text != phase.printed and self._monotonic() - phase.printed_s >= _PLAIN_EVERY_S:
            phase.printed, phase.printed_s = phase.text, self._monotonic()
            percent = "" if phase.fraction is None else f" {phase.fraction:.0%}"
            self._terminal.say(f"[{self.elapsed_s:5.1f}s] {phase.name} {phase.text}{percent}")

    def _draw(self) -> None:
        if not self._terminal.is_live or not (self._phases or self._num_drawn):
            return
        width = shutil.get_terminal_size().columns - 1
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        lines = [line for phase in self._phases.values() for line in self._lines(phase, width)]
        self._terminal.stream.write(up + "".join(f"\r\x1b[K{line}\n" for line in lines) + "\x1b[J")
        self._terminal.stream.flush()
        self._num_drawn = len(lines)

    def _lines(self, phase: _Phase, width: int) -> list[str]:
        """`  ✔ nats        nats-server 2.15.1 · nats://…      0.1s`, no longer than `width`. Why a phase failed is told whole, below it."""
        if phase.state == "running":
            sign = self._terminal.paint(_SPINNER[self._frame % len(_SPINNER)], "dim")
            seconds = self._monotonic() - phase.started_s
            text = phase.text if phase.fraction is None else f"{phase.text} {phase.fraction:.0%}"
        else:
            sign, seconds, text = self._terminal.mark(phase.state), phase.elapsed_s, phase.text
        room = max(width - _NAME_WIDTH - 13, 10)
        first, *rest = folded(text, room) if phase.state == "failed" else [shortened(text, room)]
        head = f"  {sign} {phase.name:<{_NAME_WIDTH}}{first:<{min(room, 62)}} {seconds:6.1f}s"
        return [head, *(f"{'':<{4 + _NAME_WIDTH}}{line}" for line in rest)]
