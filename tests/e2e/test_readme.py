"""Every command and program of the README is carried out as typed, against one stack with the bundled model."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from loadtest.local_stack import LocalStack
from services.console.keys import key_line
from services.console.options import parse_options
from tests.support.stack import checked_stack

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- run: ([a-z-]+) -->\n```(\w+)\n(.*?)```", re.DOTALL)
DOCUMENTED_URL = "http://127.0.0.1:8000"


class Block(NamedTuple):
    """A code block: how it is run, its language, its text."""

    how: str
    language: str
    text: str


README = (ROOT / "README.md").read_text()
BLOCKS = [Block(*match) for match in BLOCK.findall(README)]


def of(how: str) -> list[str]:
    return [block.text for block in BLOCKS if block.how == how]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("readme"), "--kv-dram", "256M") as stack:
        yield stack


def carry_out(stack: LocalStack, command: str, folder: Path, **environ: str) -> str:
    """Run a command as typed, at the test stack's address instead of the documented one."""
    command = command.replace(DOCUMENTED_URL, stack.url).replace("source .venv/bin/activate\n", "")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": path, "SS_STATE_DIR": str(stack.state_dir), **environ},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}\n{stack.output}"
    return done.stdout


def test_no_block_is_left_out() -> None:
    assert README.count("```") == 2 * (len(BLOCKS) + README.count("```mermaid"))
    assert {block.how for block in BLOCKS} == {
        "dry",
        "shell",
        "python",
        "nats",
        "nats-command",
        "help",
        "compose",
    }  # compose: by tests/compose


@pytest.mark.parametrize("command", of("shell"))
def test_commands(stack: LocalStack, tmp_path: Path, command: str) -> None:
    if command.startswith("curl") and not shutil.which("curl"):
        pytest.skip("curl is not installed on this machine")
    shown = carry_out(stack, command, tmp_path)
    if "capital of France" in command:
        assert "Paris" in (text_of_events(shown) if command.startswith("curl") else shown)


def text_of_events(stream: str) -> str:
    return "".join(re.findall(r'"content":"([^"]*)"', stream))


@pytest.mark.parametrize("program", of("python"))
def test_programs(stack: LocalStack, tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program.replace(DOCUMENTED_URL, stack.url))
    assert "Paris" in carry_out(stack, "python program.py", tmp_path)


def test_the_nats_client(stack: LocalStack, tmp_path: Path) -> None:
    (program,), (command,) = of("nats"), of("nats-command")
    (tmp_path / "client.py").write_text(program)
    assert "Paris" in carry_out(stack, command, tmp_path)


@pytest.mark.parametrize("command", [line for block in of("help") for line in block.splitlines()])
def test_flags_that_are_shown_exist(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`up` with other flags is another stack: that each is understood is enough here, the integration tests start them."""
    words = shlex.split(command, comments=True)
    monkeypatch.chdir(tmp_path)
    for name in ("model.gguf", "slipstream.creds"):
        Path(name).touch()
    Path("keys").write_text(key_line("me", "secret") + "\n")
    Path("requests.jsonl").write_text('{"prompt": "x"}')
    if words[:2] == ["slipstream", "up"]:
        parse_options(words[2:])
    else:
        assert words == ["slipstream", "down"]


@pytest.mark.parametrize("command", [line for block in of("dry") for line in block.splitlines()])
def test_make_knows_its_verbs(command: str) -> None:
    subprocess.run([*shlex.split(command, comments=True), "--dry-run"], cwd=ROOT, check=True, capture_output=True)


def test_the_documented_port_is_the_default() -> None:
    assert f"http://127.0.0.1:{parse_options([]).port}" == DOCUMENTED_URL
