"""Where people read: marks and colours on a terminal, plain lines elsewhere (and with NO_COLOR)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

MASK = "•••"
_LOGIN = re.compile(r"(\w://)[^/\s]*@")
_COLOURS = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}
_MARKS = {"done": ("✔", "green"), "failed": ("✘", "red"), "warning": ("!", "yellow"), "running": ("·", "dim")}


class Terminal:
    """One output stream. `is_live`: lines may be redrawn; `has_colour`: escape codes are welcome."""

    def __init__(self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.stream = stream or sys.stdout
        is_terminal = self.stream.isatty() and environ.get("TERM") != "dumb"
        self.is_live = is_terminal
        self.has_colour = is_terminal and not environ.get("NO_COLOR")

    def paint(self, text: str, colour: str) -> str:
        """`text` in a colour of `_COLOURS`, where there are colours."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.has_colour else text

    def mark(self, kind: str) -> str:
        """The sign of a line: done, failed, warning, running."""
        sign, colour = _MARKS[kind]
        return self.paint(sign, colour)

    def say(self, text: str = "") -> None:
        """One line, at once."""
        self.stream.write(text + "\n")
        self.stream.flush()


def size_text(num_bytes: float) -> str:
    """1073741824 → `1.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


def home_text(path: object) -> str:
    """A path with the home folder as `~`."""
    text, home = str(path), str(Path.home())
    return "~" + text[len(home) :] if text.startswith(home + os.sep) else text


def without_login(text: str) -> str:
    """`nats://user:password@host` → `nats://•••@host`, wherever in `text`."""
    return _LOGIN.sub(rf"\1{MASK}@", text)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def age_text(seconds: float) -> str:
    """`45s`, `3m`, `2h`, `4d`."""
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"
