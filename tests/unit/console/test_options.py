import hashlib
import os
from pathlib import Path

import pytest

from services.console.options import parse_options
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SS_")]:
        monkeypatch.delenv(name)


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse_options([]).device, parse_options([]).port, parse_options([]).kv_dram) == ("cpu", 8000, 2**30)
    monkeypatch.setenv("SS_DEVICE", "sim")
    monkeypatch.setenv("SS_HTTP_PORT", "9000")
    assert (parse_options([]).device, parse_options([]).port) == ("sim", 9000)
    assert parse_options(["--device", "cpu", "--port", "1"]).port == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--decode", "0"], "--decode"),
        (["--decode", "two"], "--decode"),
        (["--port", "70000"], "--port"),
        (["--kv-dram", "much"], "--kv-dram"),
        (["--kv-dram", "1K"], "the least is 4M"),
        (["--device", "tpu"], "--device"),
        (["--only", "gateway"], "--only"),
        (["--sim-profile", "x"], "a=0,b=0.2,c=1,d=8"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_bad_flag_is_a_usage_error_that_names_it(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(flags)
    assert caught.value.code == 2
    assert named in capsys.readouterr().err


def test_a_bad_variable_is_a_usage_error_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SS_HTTP_PORT", "many")
    with pytest.raises(SystemExit):
        parse_options([])
    assert "--port" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--numerics", "exact", "--dtype", "bfloat16"],
        ["--numerics", "exact", "--kv-format", "int8"],
        ["--device", "sim", "--kv-format", "fp8"],
        ["--nats-port", "8000", "--port", "8000"],
        ["--nats-creds", "x.creds"],
        ["--keys", "nowhere"],
        ["--host", "0.0.0.0"],
    ],
)
def test_contradictions_are_refused_with_a_remedy(flags: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(flags)
    assert caught.value.variable == flags[-2]
    assert caught.value.exit_code == 2


def test_an_open_host_needs_keys_or_the_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.touch()
    assert parse_options(["--host", "0.0.0.0", "--keys", str(keys)]).host == "0.0.0.0"
    monkeypatch.setenv("SS_OPEN", "1")
    assert parse_options(["--host", "0.0.0.0"]).host == "0.0.0.0"


def test_warming_a_stack_with_keys_needs_one_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, warm = tmp_path / "keys", tmp_path / "warm"
    keys.write_text(f"me:{hashlib.sha256(b'right').hexdigest()}")
    warm.write_text('{"messages": [{"role": "user", "content": "Hi"}]}')
    flags = ["--keys", str(keys), "--warm", str(warm)]
    for key, reason in (("", "not set"), ("wrong", "none of its keys")):
        monkeypatch.setenv("SS_API_KEY", key)
        with pytest.raises(ConfigError, match=reason):
            parse_options(flags)
    monkeypatch.setenv("SS_API_KEY", "right")
    assert parse_options(flags).warm == warm


def test_threads_are_divided_among_the_workers() -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert parse_options(["--prefill", "0"]).worker_threads == num_cores
    assert parse_options(["--prefill", str(num_cores)]).worker_threads == 1
    assert parse_options(["--threads", "7"]).worker_threads == 7
    assert parse_options(["--only", "decode"]).worker_threads == num_cores
