"""`slipstream completion`: a script for the shell, made from the commands' own parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence

from services.console.command_tree import Command, option_words, read_tree, walk
from services.console.usage import Parser

_BASH = """\
_slipstream() {{
  local at word=${{COMP_WORDS[COMP_CWORD]}} path=slipstream flags= words= values=
  for ((at = 1; at < COMP_CWORD; at++)); do
    case "$path ${{COMP_WORDS[at]}}" in {paths}) path="$path ${{COMP_WORDS[at]}}" ;; esac
  done
  case "$path ${{COMP_WORDS[COMP_CWORD-1]}}" in
{values}
  esac
  case "$path" in
{cases}
  esac
  if [ -n "$values" ]; then COMPREPLY=($(compgen -W "$values" -- "$word"))
  elif [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$flags" -- "$word"))
  elif [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$word"))
  else COMPREPLY=($(compgen -f -- "$word")); fi
}}
complete -o filenames -F _slipstream slipstream
"""

_ZSH = """\
#compdef slipstream
_slipstream() {{
  local at path=slipstream; local -a flags verbs values
  for ((at = 2; at < CURRENT; at++)); do
    case "$path $words[at]" in {paths}) path="$path $words[at]" ;; esac
  done
  case "$path $words[CURRENT-1]" in
{values}
  esac
  case "$path" in
{cases}
  esac
  if (( $#values )); then compadd -a values
  elif [[ $PREFIX == -* ]]; then _describe -o flag flags
  elif (( $#verbs )); then _describe command verbs
  else _files; fi
}}
(( $+functions[compdef] )) && compdef _slipstream slipstream
"""


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = Parser(
        prog="slipstream completion",
        description="Completion of commands, flags and their values.",
        epilog='bash: eval "$(slipstream completion bash)"\nzsh:  eval "$(slipstream completion zsh)"    (behind compinit)\n'
        "fish: slipstream completion fish | source",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(argv).shell
    sys.stdout.write(SCRIPTS[shell](read_tree()))
    return 0


def bash(tree: Command) -> str:
    cases = (f'    "{one.path}") flags="{" ".join(option_words(one.options))}" words="{" ".join(one.words)}" ;;' for one in walk(tree))
    values = (f'    {pattern}) values="{" ".join(choices)}" ;;' for pattern, choices in _values(tree))
    return _BASH.format(paths=_paths(tree), cases="\n".join(cases), values="\n".join(values))


def zsh(tree: Command) -> str:
    cases = (
        f'    "{one.path}") flags=({" ".join(_described(name, option.summary) for option in one.options for name in option.names)}) '
        f"verbs=({' '.join(_described(name, text) for name, text in one.words.items())}) ;;"
        for one in walk(tree)
    )
    values = (f"    {pattern}) values=({' '.join(choices)}) ;;" for pattern, choices in _values(tree))
    return _ZSH.format(paths=_paths(tree), cases="\n".join(cases), values="\n".join(values))


def fish(tree: Command) -> str:
    return "\n".join(line for one in walk(tree) for line in _fish_lines(one)) + "\n"


SCRIPTS: dict[str, Callable[[Command], str]] = {"bash": bash, "zsh": zsh, "fish": fish}


def _paths(tree: Command) -> str:
    return "|".join(f'"{one.path}"' for one in walk(tree))


def _values(tree: Command) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(pattern of `path flag`, choices) of every flag whose value is one of some."""
    for one in walk(tree):
        for option in one.options:
            if option.choices:
                yield "|".join(f'"{one.path} {name}"' for name in option.names), option.choices


def _described(name: str, summary: str) -> str:
    """For `_describe`: a colon parts the two."""
    return _quoted(name.replace(":", r"\:") + (f":{summary}" if summary else ""))


def _fish_lines(one: Command) -> Iterator[str]:
    """What follows `one`: its verbs as long as none is given, and its flags."""
    words = one.path.split()[1:]
    below = "; and not __fish_seen_subcommand_from " + " ".join(verb.path.split()[-1] for verb in one.verbs) if one.verbs else ""
    condition = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in words) or "true"
    start = f"complete -c slipstream -n {_quoted(condition + below)}"
    for name, summary in one.words.items():
        yield f"{start} -f -a {name} -d {_quoted(summary)}"
    for option in one.options:
        names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
        values = f" -x -a {_quoted(' '.join(option.choices))}" if option.choices else " -r" if option.takes_value else ""
        yield f"{start} {names}{values} -d {_quoted(option.summary)}"


def _quoted(text: str) -> str:
    """In single quotes, which all three shells read alike but for a single quote itself."""
    return "'" + text.replace("'", "’").replace("\n", " ") + "'"
