"""What can stand on the command line, read from the commands' own parsers: so that completion never lags behind them."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from services.console import __main__ as root


class Option(NamedTuple):
    """A flag of a command."""

    names: tuple[str, ...]
    summary: str
    takes_value: bool
    choices: tuple[str, ...]
    """Of its value; empty: anything, for example a file."""


class Command(NamedTuple):
    """A command, or a verb of one."""

    path: str
    """`slipstream nats ls`"""
    options: list[Option]
    words: dict[str, str]
    """What may follow by itself: verbs and choices, with what each does."""
    verbs: list[Command]
    """Those of `words` that have options of their own."""


class _Caught(BaseException):
    """Not an error: brings a parser out of the command that made it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def read_tree() -> Command:
    """`slipstream` and everything below it. Imports every command."""
    verbs = [_command(f"slipstream {name}", parser_of(name)) for name in root.COMMANDS]
    return Command("slipstream", [_HELP, Option(("--version",), "", False, ())], dict(root.COMMANDS), verbs)


def walk(command: Command) -> Iterator[Command]:
    """Itself, then all below."""
    yield command
    for verb in command.verbs:
        yield from walk(verb)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command, caught when the command is about to use it: nothing of it has run by then."""
    module = importlib.import_module(f"services.console.{name}")
    ours = argparse.ArgumentParser.parse_args

    def catch(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        raise _Caught(parser)

    argparse.ArgumentParser.parse_args = catch  # type: ignore[method-assign, assignment]  # put back below
    try:
        module.run([])
    except _Caught as caught:
        return caught.parser
    finally:
        argparse.ArgumentParser.parse_args = ours  # type: ignore[method-assign]
    raise AssertionError(f"{name} read no arguments")


_HELP = Option(("-h", "--help"), "show what it takes", False, ())


def _command(path: str, parser: argparse.ArgumentParser) -> Command:
    options, words, verbs = [], {}, []
    for action in parser._actions:  # argparse has no public way to list them
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            words.update({name: summaries.get(name, "") for name in action.choices})
            verbs += [_command(f"{path} {name}", below) for name, below in action.choices.items()]
        elif not action.option_strings:
            words.update(_choices(action.choices))
        elif action.help != argparse.SUPPRESS:
            choices = tuple(_choices(action.choices))
            options.append(Option(tuple(action.option_strings), _plain(action.help), action.nargs != 0, choices))
    return Command(path, options, words, verbs)


def _choices(choices: Any) -> Mapping[str, str]:
    """With what each does, where the choices say so."""
    if isinstance(choices, Mapping):
        return {str(name): str(text) for name, text in choices.items()}
    return {str(choice): "" for choice in choices or ()}


def _plain(text: str | None) -> str:
    """Help without its placeholders."""
    return (text or "").partition(" (default %")[0].replace("%%", "%")


def option_words(options: Sequence[Option]) -> list[str]:
    return [name for option in options for name in option.names if name.startswith("--")]
