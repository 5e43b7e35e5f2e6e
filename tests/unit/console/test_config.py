import os
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from services.console.__main__ import main
from services.console.announce import ready_block
from services.console.config import masked, read_environ, settings_of, source_of
from services.console.run_folder import Run, create_run_folder, process_start, write_run


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("SS_NATS_URL", "nats://bob:hunter2@host:4222", "nats://•••@host:4222"),
        ("SS_NATS_URL", "nats://bob:p@ss@host", "nats://•••@host"),
        ("SS_NATS_URL", "nats://a:b@one,nats://c:d@two", "nats://•••@one,nats://•••@two"),
        ("SS_NATS_URL", "nats://host:4222", "nats://host:4222"),
        ("SS_NATS_PASSWORD_FILE", "/run/secrets/x", "/run/secrets/x"),
        ("SS_API_KEY", "ss-abc", "•••"),
        ("SS_NATS_PASSWORD", "x", "•••"),
        ("SS_NATS_PASSWORD", "", ""),
    ],
)
def test_what_opens_doors_is_not_shown(variable: str, value: str, shown: str) -> None:
    assert masked(variable, value) == shown


def test_no_login_reaches_the_screen(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SS_NATS_URL", "nats://bob:hunter2@host:4222")
    for flags in ([], ["--json"], ["--origin"], ["--changed"]):
        assert main(["config", "decode", "--state-dir", str(tmp_path), *flags]) == 0
    shown = capsys.readouterr().out
    assert "hunter2" not in shown and "nats://•••@host:4222" in shown


def test_origins_of_a_running_process_are_told_by_the_one_that_started_it(tmp_path: Path) -> None:
    ours = {"PATH": os.environ["PATH"], "SS_LOG_LEVEL": "debug", "SS_MAX_NUM_SEQS": "4"}
    up = _process(ours)
    decode = _process(ours | {"SS_MAX_NUM_SEQS": "8", "SS_DEVICE": "sim", "SS_MAX_MODEL_LEN": "99", "SS_KV_FORMAT": "native"})
    try:
        started = process_start(up.pid)
        assert started is not None
        run = Run(
            folder=create_run_folder(tmp_path),
            pid=up.pid,
            pid_start=started,
            version="1",
            namespace="ss",
            nats_url="",
            services={"decode-0": decode.pid},
        )
        write_run(run)
        source = source_of("decode", "decode", tmp_path)
        assert source.text == f"as decode-0 runs (pid {decode.pid}) in {run.folder.name}"
        origins = {one.variable: (one.value, one.origin) for one in settings_of("decode", source._replace(argv=("up", "--max-model=99")))}
        assert origins["SS_LOG_LEVEL"] == ("debug", "environment"), "of up, not of this command"
        assert origins["SS_MAX_NUM_SEQS"] == ("8", "up"), "it decided otherwise than its environment says"
        assert origins["SS_DEVICE"] == ("sim", "up")
        assert origins["SS_MAX_MODEL_LEN"] == ("99", "--max-model-len"), "its beginning was typed"
        assert origins["SS_KV_FORMAT"] == ("native", "default"), "up hands it on as it is"
        assert origins["SS_DTYPE"][1] == "default"
    finally:
        for process in (up, decode):
            process.kill()
            process.communicate()


def _process(environ: dict[str, str]) -> Popen[bytes]:
    """A process whose environment can be read: the kernel shows none in the last steps of exec, when Popen has already returned."""
    process = Popen(["cat"], env=environ, stdin=PIPE, stdout=PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"ready\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"ready\n"
    return process


def test_a_process_that_is_gone_has_no_environment() -> None:
    assert read_environ(2**22 + 1) == {}


def test_the_ready_block_shows_no_login(tmp_path: Path) -> None:
    run = Run(folder=tmp_path, pid=1, pid_start=1, version="1", namespace="ss", nats_url="nats://bob:hunter2@host:4222")
    assert "hunter2" not in ready_block(run, 1.0)
    lines = ready_block(run, 1.0, " --state-dir '/a b'")
    assert "slipstream top --state-dir '/a b'\n" in lines and "slipstream down --state-dir '/a b'" in lines


def test_the_ready_block_says_that_a_key_is_needed(tmp_path: Path) -> None:
    run = Run(folder=tmp_path, pid=1, pid_start=1, version="1", namespace="ss", nats_url="", http_url="http://127.0.0.1:8000")
    assert "key" not in ready_block(run, 1.0).lower()
    lines = ready_block(run, 1.0, keys=Path("/etc/keys"))
    assert "http://127.0.0.1:8000/v1    with a key of /etc/keys" in lines and "SS_API_KEY=… slipstream chat" in lines
