"""Where people read: marks and colours on a terminal, plain lines elsewhere (and with NO_COLOR)."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

MASK = "•••"
WIDE = 1000
"""Columns of what is no terminal: nothing is cut."""
_LOGIN = re.compile(r"(\w://)[^/\s]*@")
_PAINT = re.compile(r"(\x1b\[[0-9;]*m)")
_COLOURS = {"green": "32", "red": "31", "yellow": "33", "dim": "2", "bold": "1"}
_MARKS = {"done": ("✔", "green"), "failed": ("✘", "red"), "warning": ("!", "yellow"), "running": ("·", "dim")}


class Terminal:
    """One output stream. `is_live`: lines may be redrawn; `has_colour`: escape codes are welcome; `columns`: as it began."""

    def __init__(self, stream: TextIO | None = None, environ: Mapping[str, str] = os.environ) -> None:
        self.stream = stream or sys.stdout
        is_terminal = self.stream.isatty() and environ.get("TERM") != "dumb"
        self.is_live = is_terminal
        self.has_colour = is_terminal and not environ.get("NO_COLOR")
        self.columns = shutil.get_terminal_size().columns if is_terminal else WIDE

    def paint(self, text: str, colour: str) -> str:
        """`text` in a colour of `_COLOURS`, where there are colours."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.has_colour and text else text

    def mark(self, kind: str) -> str:
        """The sign of a line: done, failed, warning, running."""
        sign, colour = _MARKS[kind]
        return self.paint(sign, colour)

    def say(self, text: str = "") -> None:
        """One line, at once."""
        self.stream.write(text + "\n")
        self.stream.flush()


def clip(line: str, columns: int) -> str:
    """The first `columns` characters as they are seen; colours count nothing and are ended."""
    seen, end = 0, 0
    for part in _PAINT.split(line):
        if not _PAINT.fullmatch(part):
            if seen + len(part) > columns:
                return line[: end + columns - seen] + ("\x1b[0m" if "\x1b" in line else "")
            seen += len(part)
        end += len(part)
    return line


def shortened(text: str, columns: int) -> str:
    """Not longer than `columns`; what is cut off is told by `…`."""
    return text if len(text) <= columns else text[: max(columns - 1, 0)] + "…"


def share_text(share: float) -> str:
    """`12%`; what is there, but rounds to nothing, is `<1%`."""
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


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


def table(rows: Sequence[Sequence[str]], widths: Mapping[str, int] | None = None) -> list[str]:
    """Columns as wide as their widest cell; those that `widths` names by their heading (first row) at least so wide, and to the right.

    So what changes while it is looked at stays in its place.
    """
    rights = widths or {}
    wide = [max(rights.get(column[0], 0), *map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if heading in rights else "<" for heading in rows[0]]
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, wide, strict=True)).rstrip() for row in rows]


def narrowed(rows: Sequence[Sequence[str]], columns: int, droppable: Sequence[str], widths: Mapping[str, int] | None = None) -> list[str]:
    """As `table`; too wide for `columns`, it goes without those of the headings (first row) in `droppable`, one after the other."""
    lines = table(rows, widths)
    for heading in droppable:
        if max(map(len, lines)) <= columns or heading not in rows[0]:
            break
        at = list(rows[0]).index(heading)
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
        lines = table(rows, widths)
    return lines


def folded(text: str, columns: int, indent: int = 0) -> list[str]:
    """Broken at blanks, so that no line is wider than `columns` (a longer word is left whole); all but the first begin with blanks."""
    return textwrap.wrap(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False) or [""]


def counted(number: float, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{number:,.0f} {noun}{'s' * (number != 1)}"


def age_text(seconds: float) -> str:
    """`45s`, `3m`, `2h`, `4d`: as many as are full."""
    for unit, length_s in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length_s:
            return f"{seconds // length_s:.0f}{unit}"
    return f"{max(seconds, 0) // 1:.0f}s"
