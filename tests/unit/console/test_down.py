import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from services.console.__main__ import main
from services.console.run_folder import Run, create_run_folder, process_start, write_run

MakeStack = Callable[..., tuple[str, Popen[bytes]]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeStack]:
    """A run whose supervisor is a process that ends when it is asked to."""
    processes: list[Popen[bytes]] = []

    def one(**fields: object) -> tuple[str, Popen[bytes]]:
        process = Popen(["sleep", "60"])
        processes.append(process)
        started = process_start(process.pid)
        assert started is not None
        folder = create_run_folder(tmp_path)
        defaults = {"version": "1", "namespace": "ss", "nats_url": "nats://a"}
        write_run(Run(folder=folder, pid=process.pid, pid_start=started, **{**defaults, **fields}))  # type: ignore[arg-type]
        return folder.name, process

    yield one
    for process in processes:
        process.kill()
        process.wait()


def down(root: Path, *flags: str) -> int:
    return main(["down", "--state-dir", str(root), *flags])


def is_alive(process: Popen[bytes]) -> bool:
    return process_start(process.pid) is not None


def test_of_several_stacks_none_is_stopped_unless_one_is_named(tmp_path: Path, make: MakeStack, capsys: pytest.CaptureFixture[str]) -> None:
    (first_name, first), (second_name, second) = make(http_url="http://127.0.0.1:8001"), make(nats_url="nats://b")
    assert down(tmp_path) == 3
    told = capsys.readouterr().err
    assert "2 stacks run" in told and f"--run {first_name}" in told and f"--run {second_name}" in told and "8001" in told
    assert is_alive(first) and is_alive(second)
    assert down(tmp_path, "--run", second_name) == 0
    assert f"stopped {second_name}" in capsys.readouterr().out
    assert is_alive(first) and second.wait(5) == -signal.SIGTERM
    assert down(tmp_path) == 0, "one is left, so no name is needed"
    assert f"stopped {first_name}" in capsys.readouterr().out


def test_guests_leave_before_their_host_and_others_stay(tmp_path: Path, make: MakeStack, capsys: pytest.CaptureFixture[str]) -> None:
    (host_name, _), (guest_name, _) = make(), make(joined=True)
    _, other = make(nats_url="nats://b")
    assert down(tmp_path, "--run", host_name) == 0
    lines = capsys.readouterr().out.splitlines()
    assert guest_name in lines[0] and host_name in lines[1] and len(lines) == 2
    assert is_alive(other)


def test_a_guest_can_leave_alone(tmp_path: Path, make: MakeStack) -> None:
    (_, host), (guest_name, guest) = make(), make(joined=True)
    assert down(tmp_path, "--run", guest_name) == 0
    assert is_alive(host) and not is_alive(guest)


def test_variables_of_another_nats_do_not_change_what_down_stops(tmp_path: Path, make: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SS_NATS_URL", "nats://elsewhere")
    monkeypatch.setitem(os.environ, "SS_NATS_USER", "console")
    _, stack = make()
    assert down(tmp_path) == 0
    assert not is_alive(stack)


def test_for_scripts(tmp_path: Path, make: MakeStack, capsys: pytest.CaptureFixture[str]) -> None:
    name, _ = make()
    assert down(tmp_path, "--json") == 0 and down(tmp_path, "--json") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"stopped": [name]}, {"stopped": []}]
