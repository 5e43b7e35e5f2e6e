"""`slipstream completion`: a script for the shell, made from the commands' own help."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import sys
from collections.abc import Sequence

from services.console import __main__ as root

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")

_BASH = """\
_slipstream() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}}
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case $command in
{cases}
  esac
  case $word in -*) COMPREPLY=($(compgen -W "$words" -- "$word"));; *) COMPREPLY=($(compgen -f -- "$word"));; esac
}}
complete -F _slipstream slipstream
"""


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="slipstream completion",
        description='Completion of commands and flags.  bash: eval "$(slipstream completion bash)"    '
        "zsh: the same behind autoload -U bashcompinit && bashcompinit    fish: slipstream completion fish | source",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(argv).shell
    flags = {command: flags_of(command) for command in root.COMMANDS}
    sys.stdout.write(fish(flags) if shell == "fish" else bash(flags))
    return 0


def flags_of(command: str) -> list[str]:
    """As the command's help names them."""
    shown = io.StringIO()
    module = importlib.import_module(f"services.console.{command}")
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        module.run(["--help"])
    return sorted(set(_FLAG.findall(shown.getvalue())))


def bash(flags: dict[str, list[str]]) -> str:
    cases = "\n".join(f'    {command}) local words="{" ".join(words)}";;' for command, words in flags.items())
    return _BASH.format(commands=" ".join(flags), cases=cases)


def fish(flags: dict[str, list[str]]) -> str:
    lines = [
        f"complete -c slipstream -n __fish_use_subcommand -f -a {name} -d '{text}'".replace("'s ", " ")
        for name, text in root.COMMANDS.items()
    ]
    lines += [
        f"complete -c slipstream -n '__fish_seen_subcommand_from {name}' -l {flag.removeprefix('--')}"
        for name, words in flags.items()
        for flag in words
    ]
    return "\n".join(lines) + "\n"
