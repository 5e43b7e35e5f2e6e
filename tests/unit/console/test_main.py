import subprocess
import sys

import pytest

from services.console.__main__ import COMMANDS, main


def test_help_lists_every_command_and_imports_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    program = """
import sys
from services.console.__main__ import main
try:
    main(["--help"])
finally:
    print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    assert not {"torch", "numpy", "nats", "msgspec", "asyncio"} & set(loaded)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("slipstream 0.")


def test_a_misspelt_command_is_a_usage_error_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stauts"]) == 2
    assert "did you mean status?" in capsys.readouterr().err


def test_a_command_line_that_cannot_be_understood_is_told_in_a_line_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("status --nonsense", "nats", "top --interval 0", "top --interval nan", "logs --level loud", "logs -n -5",
                 "chat --temperature nan hi", "chat --max-tokens -1 hi", "chat --url http://127.0.0.1:99999 hi", "nats req",
                 "nats req a..b", "nats req a.*", "nats ls a.b", "nats req a --replies -1", "nats req a --timeout nan"):  # fmt: skip
        assert main(text.split()) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("✘ ") and len(told.err.splitlines()) <= 2, told.err


@pytest.mark.parametrize("arguments", [["chat", "a\udcff"], ["\udcff"], ["up", "--model", "\udcff"], ["nats", "req", "a", "\udcff"]])
def test_a_word_that_is_not_text_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """How Python shows bytes of the command line that are not UTF-8."""
    assert main(arguments) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


def test_so_is_a_variable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SS_URL", "http://\udcff")
    assert main(["chat", "hi"]) == 2
    assert capsys.readouterr().err.startswith("✘ SS_URL: ")


@pytest.mark.parametrize("key", ["é", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SS_API_KEY", key)
    assert main(["chat", "--url", "http://127.0.0.1:1", "hi"]) == 2
    told = capsys.readouterr().err
    assert "SS_API_KEY" in told and key not in told.replace("SS_API_KEY", "")


@pytest.mark.parametrize("url", ["http://a..b", "http://a b", "http://127.0.0.1:0", "https://x", "http://"])
def test_what_is_no_address_of_a_gateway(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "hi"]) == 2
    assert "not an http:// address" in capsys.readouterr().err
