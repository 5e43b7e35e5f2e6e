import hashlib
import os
from pathlib import Path

import pytest

from services.console.options import parse_options
from services.console.usage import UsageFault
from shared.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_settings")


def test_flags_win_over_variables_and_variables_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (parse_options([]).device, parse_options([]).port, parse_options([]).kv_dram) == ("cpu", 8000, 2**30)
    monkeypatch.setenv("SS_DEVICE", "sim")
    monkeypatch.setenv("SS_HTTP_PORT", "9000")
    assert (parse_options([]).device, parse_options([]).port) == ("sim", 9000)
    assert parse_options(["--device", "cpu", "--port", "1"]).port == 1


@pytest.mark.parametrize(
    ("flags", "remedy"),
    [
        (["--decode", "0"], "--help"),
        (["--decode", "two"], "--help"),
        (["--prefill", "999999999"], "--help"),
        (["--threads", "1025"], "--help"),
        (["--max-model-len", "9" * 5000], "--help"),
        (["--namespace", "a.b"], "--help"),
        (["--model", ""], "--help"),
        (["--port", "70000"], "--help"),
        (["--kv-dram", "much"], "512M"),
        (["--kv-dram", "1K"], "--help"),
        (["--device", "tpu"], "--help"),
        (["--only", "gateway"], "--help"),
        (["--sim-profile", "x"], "a=0,b=0.2,c=1,d=8"),
        (["--max-model-len", "5"], "at least 64"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_flag_and_what_to_do(flags: list[str], remedy: str) -> None:
    with pytest.raises(UsageFault) as caught:
        parse_options(flags)
    assert caught.value.exit_code == 2
    assert caught.value.message.startswith(f"{flags[0]}: ") and flags[1] in caught.value.message
    assert "\n" not in caught.value.message
    assert remedy in caught.value.remedy


def test_an_unknown_flag_is_named() -> None:
    with pytest.raises(UsageFault, match="--nonsense"):
        parse_options(["--nonsense"])


def test_the_least_context_is_taken_and_0_is_the_models() -> None:
    assert parse_options(["--max-model-len", "64"]).max_model_len == 64
    assert parse_options(["--max-model-len", "0"]).max_model_len == 0


@pytest.mark.parametrize(
    ("variable", "value", "flags"),
    [
        ("SS_HTTP_PORT", "many", ["--port", "1"]),
        ("SS_DEVICE", "tpu", ["--device", "sim"]),
        ("SS_SIM_PROFILE", "x", ["--sim-profile=a=1"]),
    ],
)
def test_a_bad_variable_is_named_and_a_flag_makes_it_good(
    variable: str, value: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageFault) as caught:
        parse_options([])
    assert caught.value.message.startswith(f"{variable}: ") and value in caught.value.message
    parse_options(flags)


def test_keys_that_are_none_are_named_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("no key at all\n")
    with pytest.raises(ConfigError) as caught:
        parse_options(["--keys", str(keys)])
    assert caught.value.variable == "--keys" and str(keys) in caught.value.message
    monkeypatch.setenv("SS_KEYS_FILE", str(keys))
    with pytest.raises(ConfigError) as caught:
        parse_options([])
    assert caught.value.variable == "SS_KEYS_FILE" and str(keys) in caught.value.message


@pytest.mark.parametrize(
    "flags",
    [
        ["--numerics", "exact", "--dtype", "bfloat16"],
        ["--numerics", "exact", "--kv-format", "int8"],
        ["--device", "sim", "--kv-format", "fp8"],
        ["--nats-port", "8000", "--port", "8000"],
        ["--nats-creds", "x.creds"],
        ["--run", "122532"],
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
    keys.write_text(f"me:{hashlib.sha256(b'right').hexdigest()}")
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
