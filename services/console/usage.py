"""Command lines that cannot be understood: told as every other fault is, in one line with what to do."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from shared.errors import SlipstreamError

_ARGUMENT = re.compile(r"argument (\S+): (.*)", re.DOTALL)


class UsageFault(SlipstreamError):
    """A flag or word that is unknown, missing, or has a value that does not fit. `flag`: of which one; empty: none in particular."""

    code = "usage"
    exit_code = 2

    def __init__(self, message: str, *, flag: str = "", remedy: str = "") -> None:
        super().__init__(f"{flag}: {message}" if flag else message, remedy=remedy)
        self.flag = flag
        self.reason = message


class Parser(argparse.ArgumentParser):
    """Raises UsageFault instead of printing all flags and ending the process.

    The type of a flag raises ArgumentTypeError: what is wrong, and on further lines what to do.
    """

    def error(self, message: str) -> NoReturn:
        found = _ARGUMENT.fullmatch(message)
        flag, text = (found[1], found[2]) if found else ("", message)
        cause, _, remedy = text.partition("\n")
        raise UsageFault(cause, flag=flag, remedy=remedy or f"What it takes: {self.prog} --help")


def check_text(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """UsageFault for a word, or a variable of ours, that is not UTF-8: it would fail wherever it is sent or written."""
    named = [("", word) for word in arguments] + [(name, value) for name, value in environ.items() if name.startswith("SS_")]
    for name, text in named:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageFault(f"{text!r} is not text in UTF-8", flag=name) from None


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of a flag that counts something."""

    def parse(text: str) -> int:
        if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return parse


def number(least: float, most: float) -> Callable[[str], float]:
    """The type of a flag that measures something. `nan` is no number."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:,g}")
        return value

    return parse
