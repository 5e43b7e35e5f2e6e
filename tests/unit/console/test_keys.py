import io
import stat
import sys
from pathlib import Path

import pytest

from services.console.__main__ import main
from services.gateway.auth import read_keys
from shared.errors import Unauthorized


def test_a_new_key_opens_the_gateway_and_another_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    assert main(["keys", "new", "--tenant", "ann", "--file", str(file)]) == 0
    ann = capsys.readouterr().out.strip()
    assert main(["keys", "new", "--tenant", "bob", "--file", str(file)]) == 0
    bob = capsys.readouterr().out.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ann not in file.read_text()
    keys = read_keys(file)
    assert (keys.tenant(f"Bearer {ann}"), keys.tenant(f"Bearer {bob}")) == ("ann", "bob")
    with pytest.raises(Unauthorized):
        keys.tenant("Bearer ss-guess")


def test_a_key_of_ones_own_is_hashed_from_stdin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("my own key\n"))
    assert main(["keys", "hash", "--tenant", "ann"]) == 0
    (tmp_path / "keys").write_text(capsys.readouterr().out)
    assert read_keys(tmp_path / "keys").tenant("Bearer my own key") == "ann"


def test_a_tenant_that_would_break_the_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "a:b"]) == 2
    assert "--tenant" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "\n", "clé\n", "\ufffd\n"])
def test_what_no_client_can_send_is_no_key(text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The line of an empty one would let everybody in who sends none."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert main(["keys", "hash"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "no key" in told.err
