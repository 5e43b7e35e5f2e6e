from pathlib import Path

from services.console.last_start import FILE, FailedStart, failed_start_findings, forget_failed_start, note_failed_start

TAKEN = FailedStart(at_s=1000.0, phase="gateway", message="127.0.0.1:8000 is in use by pid 7", remedy="slipstream up --port 8001")


def test_a_failed_start_is_told_until_one_succeeds(tmp_path: Path) -> None:
    assert failed_start_findings(tmp_path, 1060.0) == []
    note_failed_start(tmp_path, TAKEN)
    [found] = failed_start_findings(tmp_path, 1060.0)
    assert found.state == "failed" and found.remedy == TAKEN.remedy
    assert found.text == "the last start failed 1m ago at gateway: 127.0.0.1:8000 is in use by pid 7"
    forget_failed_start(tmp_path)
    assert failed_start_findings(tmp_path, 1060.0) == []


def test_a_folder_that_cannot_be_written_and_a_file_that_cannot_be_read_are_no_second_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    note_failed_start(tmp_path / "file", TAKEN)
    (tmp_path / FILE).write_bytes(b"{")
    assert failed_start_findings(tmp_path, 0.0) == []
