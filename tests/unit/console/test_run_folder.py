import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.console.run_folder import (
    Run,
    choose,
    create_run_folder,
    find_run,
    find_run_or_last,
    guests_of,
    live_runs,
    process_age_s,
    process_start,
    read_run,
    remove_stale_arenas,
    state_dir,
    write_run,
    write_secret,
)
from shared.errors import EnvironmentFault


def make(root: Path, **fields: object) -> Run:
    start = process_start(os.getpid())
    assert start
    defaults = {
        "folder": create_run_folder(root),
        "pid": os.getpid(),
        "pid_start": start,
        "version": "1",
        "namespace": "ss",
        "nats_url": "nats://x",
    }
    run = Run(**{**defaults, **fields})  # type: ignore[arg-type]
    write_run(run)
    return run


def test_a_run_is_written_and_read_back(tmp_path: Path) -> None:
    run = make(tmp_path, kv_dir=Path("/dev/shm/x"), services={"decode-0": 7})
    assert read_run(run.folder) == run
    assert live_runs(tmp_path) == [run]


def test_a_reused_pid_is_not_the_run(tmp_path: Path) -> None:
    make(tmp_path, pid_start=1)
    assert live_runs(tmp_path) == []
    with pytest.raises(EnvironmentFault, match="no stack is running") as caught:
        find_run(tmp_path)
    assert "slipstream up" in caught.value.remedy


def test_commands_talk_to_the_run_with_the_nats(tmp_path: Path) -> None:
    own = make(tmp_path)
    make(tmp_path, joined=True)
    assert find_run(tmp_path) == own


def test_of_several_stacks_one_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(tmp_path, http_url="http://127.0.0.1:8001"), make(tmp_path)
    with pytest.raises(EnvironmentFault, match="2 stacks run here") as caught:
        find_run(tmp_path)
    assert f"--run {first.folder.name}" in caught.value.remedy and "http://127.0.0.1:8001" in caught.value.remedy
    assert f"--run {second.folder.name}" in caught.value.remedy
    assert find_run(tmp_path, first.folder.name) == first
    monkeypatch.setenv("SS_RUN", second.folder.name)
    assert find_run(tmp_path) == second
    assert find_run(tmp_path, first.folder.name) == first, "the flag wins over the variable"
    with pytest.raises(EnvironmentFault, match="run-nothing") as caught:
        find_run(tmp_path, "run-nothing")
    assert first.folder.name in caught.value.remedy


def test_the_end_of_a_name_is_enough_where_it_fits_one(tmp_path: Path) -> None:
    runs = []
    for name in ("run-20260101-101500", "run-20260101-201500"):
        (tmp_path / name).mkdir()
        runs.append(make(tmp_path, folder=tmp_path / name))
    assert find_run(tmp_path, "201500") == runs[1]
    assert find_run(tmp_path, "20260101-101500") == runs[0]
    with pytest.raises(EnvironmentFault, match="no running stack is called 1500"):
        find_run(tmp_path, "1500")  # not a whole part of the name


def test_a_stack_and_its_guests_are_no_two_stacks(tmp_path: Path) -> None:
    host, other = make(tmp_path), make(tmp_path, nats_url="nats://y")
    guest = make(tmp_path, joined=True)
    stranger = make(tmp_path, joined=True, namespace="s2")
    assert guests_of(host, [host, other, guest, stranger]) == [guest]
    assert guests_of(other, [host, other, guest, stranger]) == []
    assert guests_of(guest, [host, other, guest, stranger]) == []
    assert choose([host, guest]) == host


def test_what_ended_is_found_where_nothing_lives_or_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no stack is running"):
        find_run_or_last(tmp_path)
    guest = make(tmp_path, pid_start=1, joined=True)
    assert find_run_or_last(tmp_path) == guest
    ended, last = make(tmp_path, pid_start=1), make(tmp_path, pid_start=1)
    make(tmp_path, pid_start=1, joined=True)
    assert find_run_or_last(tmp_path) == last, "its guests saw no request"
    alive = make(tmp_path)
    assert find_run_or_last(tmp_path) == alive
    assert find_run_or_last(tmp_path, ended.folder.name) == ended
    make(tmp_path)
    with pytest.raises(EnvironmentFault, match="2 stacks run"):
        find_run_or_last(tmp_path)


def test_a_foreign_run_file_is_no_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    (run.folder / "run.json").write_bytes(msgspec.json.encode({"pid": "x"}))
    assert read_run(run.folder) is None


def test_folders_and_secrets_are_private(tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path)
    assert create_run_folder(tmp_path) != folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = write_secret(folder / "password", "x")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        write_secret(secret, "y")


def test_the_arena_of_a_run_that_died_is_removed(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    dead, alive = memory / "dead", memory / "alive"
    dead.mkdir(parents=True)
    alive.mkdir()
    make(tmp_path, kv_dir=dead, pid_start=1)
    make(tmp_path, kv_dir=alive)
    make(tmp_path, kv_dir=tmp_path, pid_start=1)
    remove_stale_arenas(memory, tmp_path)
    assert (dead.exists(), alive.exists(), tmp_path.exists()) == (False, True, True)


def test_an_ended_process_has_no_start() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        assert process_start(child.pid) is None


def test_where_the_state_lies() -> None:
    assert state_dir(Path("/a"), {}) == Path("/a")
    assert state_dir(None, {"SS_STATE_DIR": "/b"}) == Path("/b")
    assert state_dir(None, {"XDG_STATE_HOME": "/c"}) == Path("/c/slipstream")


def test_in_a_container_the_environment_names_the_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("URL", "nats://nats:4222"), ("USER", "console"), ("PASSWORD_FILE", "/s/p"), ("CLIENT_PASSWORD_FILE", "/s/c")):
        monkeypatch.setenv(f"SS_NATS_{name}", value)
    run = find_run(tmp_path)
    assert (run.nats_url, run.nats_user, run.nats_password_file) == ("nats://nats:4222", "console", Path("/s/p"))
    assert (run.nats_client_user, run.nats_client_password_file, run.state) == ("client", Path("/s/c"), "ready")


def test_the_age_of_a_process() -> None:
    """This one is younger than the machine, and older than a process that it starts."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert 0 <= process_age_s(child.pid) <= process_age_s(os.getpid()) <= process_age_s(1)
        finally:
            child.kill()
    assert process_age_s(2**22 + 1) == 0


def test_which_of_its_processes_are_not_ready(tmp_path: Path) -> None:
    run = make(tmp_path, services={"nats": 1, "router": 2, "decode-0": 3, "gateway": 4}, away=["prefill-0"])
    assert run.absent({"router", "gateway", "a-guest"}) == ["decode-0", "prefill-0"]
