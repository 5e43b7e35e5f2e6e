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
