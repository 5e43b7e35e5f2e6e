import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from services.console.__main__ import COMMANDS, main
from services.console.command_tree import Command, Option, parser_of, read_tree, walk
from services.console.completion import SCRIPTS, bash, fish, zsh


@pytest.fixture(scope="module")
def tree() -> Command:
    return read_tree()


def at(tree: Command, path: str) -> Command:
    return next(one for one in walk(tree) if one.path == path)


def test_the_tree_has_commands_verbs_choices_and_values(tree: Command) -> None:
    assert list(tree.words) == list(COMMANDS)
    assert set(at(tree, "slipstream nats").words) >= {"ls", "ping", "req"}
    assert at(tree, "slipstream nats").words["ls"] == "list services"
    assert {name for option in at(tree, "slipstream nats req").options for name in option.names} >= {"--replies", "--timeout"}
    assert set(at(tree, "slipstream doctor").words) == {"environment", "stack", "cache"}
    [level] = [option for option in at(tree, "slipstream logs").options if "--level" in option.names]
    assert level.takes_value and "warning" in level.choices
    [follow] = [option for option in at(tree, "slipstream logs").options if "--follow" in option.names]
    assert follow.names == ("-f", "--follow") and not follow.takes_value


def test_reading_the_tree_leaves_argparse_as_it_was() -> None:
    before = argparse.ArgumentParser.parse_args
    assert parser_of("status").prog == "slipstream status"
    assert argparse.ArgumentParser.parse_args is before


def ask_bash(script: str, *words: str) -> list[str]:
    shell = shutil.which("bash")
    assert shell
    line = " ".join(f"'{word}'" for word in words)
    program = f'{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _slipstream; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([shell, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["do"], ["down", "doctor"]),
        (["up", "--kv-d"], ["--kv-dram"]),
        (["up", "--device", ""], ["cpu", "cuda", "sim"]),
        (["up", "--device", "sim", "--numerics", "e"], ["exact"]),
        (["logs", "--level", "w"], ["warning"]),
        (["doctor", "s"], ["stack"]),
        (["nats", "re"], ["req"]),
        (["nats", "req", "--rep"], ["--replies"]),
        (["completion", "b"], ["bash"]),
    ],
)
def test_bash_completes(tree: Command, words: list[str], expected: list[str]) -> None:
    assert ask_bash(bash(tree), "slipstream", *words) == expected


def test_what_no_parser_knows_is_a_file(tree: Command, tmp_path: Path) -> None:
    assert ask_bash(bash(tree), "slipstream", "up", "--keys", f"{tmp_path}/no") == []


def test_quotes_and_colons_of_a_summary_do_not_end_it() -> None:
    option = Option(("--at",), "host's address: port", True, ())
    tree = Command("slipstream", [option], {"nats": "ls, info: all"}, [])
    assert r"'--at:host’s address: port'" in zsh(tree)
    assert "-d 'host’s address: port'" in fish(tree)


@pytest.mark.parametrize(("path", "condition"), [("nats", "nats; and not __fish_seen_subcommand_from"), ("logs", "logs'")])
def test_fish_lists_verbs_until_one_is_given(tree: Command, path: str, condition: str) -> None:
    lines = [line for line in fish(tree).splitlines() if f"__fish_seen_subcommand_from {condition}" in line]
    assert lines, path


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "\t" not in script


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_reads_its_script(shell: str, tree: Command) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([program, "-n", "/dev/stdin"], input=SCRIPTS[shell](tree), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
