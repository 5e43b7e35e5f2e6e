import json
import time
from pathlib import Path

import pytest

from services.console.__main__ import main
from services.console.logs import Tail, log_files
from services.console.run_folder import Run, create_run_folder, write_run
from shared.errors import EnvironmentFault


def line(second: int, level: str = "info", service: str = "decode-0", **more: str) -> str:
    return (
        json.dumps({"time": f"2026-01-01T00:00:{second:02}.000+00:00", "level": level, "service": service, "message": "m", **more}) + "\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that has ended."""
    folder = create_run_folder(tmp_path)
    write_run(Run(folder=folder, pid=0, pid_start=0, version="1", namespace="ss", nats_url=""))
    (folder / "decode-0.log").write_text(line(1) + "a library speaks\n" + line(4, "error", code="engine_error", traceback="Traceback\n  x"))
    (folder / "decode-1.log").write_text(line(3, "debug", "decode-1"))
    (folder / "router.log").write_text(line(2, "warning", "router"))
    return folder


def logs(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> list[str]:
    capsys.readouterr()
    assert main(["logs", "--state-dir", str(folder.parent), *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_merged_by_time_and_a_library_keeps_its_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = logs(folder, capsys)
    assert [one.split()[1] for one in shown[:4]] == ["decode-0", "decode-0", "router", "decode-0"]
    assert "a library speaks" in shown[1]
    assert "code=engine_error" in shown[3] and shown[4:] == ["Traceback", "  x"]
    assert not any("\x1b" in one for one in shown)


def test_lines_of_nats_server_have_their_time_and_level(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC-3")  # three hours ahead
    time.tzset()
    told = [
        "03:00:03.500000 [WRN] it is slow",
        "03:00:02.500000 [INF] Server is ready",
        "03:00:09.000000 [WRN] Plaintext passwords detected, …",
    ]
    (folder / "nats.log").write_text("".join(f"[9] 2026/01/01 {line}\n" for line in told))
    try:
        shown = logs(folder, capsys, "--level", "info")
        assert [one.split()[1:3] for one in shown[2:5]] == [["router", "warning"], ["nats", "info"], ["nats", "warning"]]
        assert shown[4] == "00:00:03.500  nats        warning  it is slow"
        assert "Plaintext" not in "".join(logs(folder, capsys, "nats", "--level", "warning")), "they lie in a 0600 file"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_role_a_level_and_the_last_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(logs(folder, capsys, "decode", "--level", "debug")) == 6
    assert [one.split()[1] for one in logs(folder, capsys, "--level", "warning")[:2]] == ["router", "decode-0"]
    assert len(logs(folder, capsys, "decode-1", "--level", "debug")) == 1
    assert "decode-0" in logs(folder, capsys, "-n", "1")[0]
    [as_it_stands] = logs(folder, capsys, "router", "--json")
    assert json.loads(as_it_stands)["level"] == "warning"


def test_a_service_that_was_not_there_is_told_which_were(folder: Path) -> None:
    with pytest.raises(EnvironmentFault, match="no log of kvstore") as caught:
        log_files(folder, "kvstore")
    assert "decode-0, decode-1, router" in caught.value.remedy


def test_following_reads_on_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    file.write_text(line(1))
    tail = Tail(file)
    assert len(list(tail.read())) == 1 and list(tail.read()) == []
    half = line(2)
    with file.open("a") as out:
        out.write(half[:20])
        out.flush()
        assert list(tail.read()) == []
        out.write(half[20:])
    assert [one["time"][17:19] for one in tail.read()] == ["02"]


def test_a_file_that_was_made_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "decode-0.log"
    file.write_text(line(1) + line(2))
    tail = Tail(file)
    assert len(list(tail.read())) == 2
    fresh = tmp_path / "fresh"
    fresh.write_text(line(3))
    fresh.replace(file)
    assert [one["time"][17:19] for one in tail.read()] == ["03"]


def test_in_a_container_it_says_who_has_the_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SS_LOGS_COMMAND", "docker compose logs")
    with pytest.raises(EnvironmentFault) as caught:
        log_files(tmp_path, "router")
    assert caught.value.remedy == "docker compose logs router"
