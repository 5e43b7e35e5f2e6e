"""Every bench that the help names can be asked for its own."""

from __future__ import annotations

import importlib

import pytest

from services.console.bench import BENCHES, run


@pytest.mark.parametrize("name", BENCHES)
def test_each_bench_answers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run([name, "--help"])
    assert left.value.code == 0
    assert "usage: slipstream bench" in capsys.readouterr().out
    assert importlib.import_module(f"loadtest.bench.{name.replace('-', '_')}").__doc__
