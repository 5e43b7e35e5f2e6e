"""The measurement of similarity: what it counts on prompts of which the answer is known."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from loadtest.similarity import main


def words(seed: int, count: int) -> str:
    generator = random.Random(seed)
    return " ".join("".join(generator.choices("abcdefghijklmnop", k=6)) for _ in range(count))


def write(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"input": prompt, "output": "", "timestamp": 1}) + "\n" for prompt in prompts))
    return path


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    return {row["name"]: row["value"] for row in msgspec.json.decode(capsys.readouterr().out)}


def test_a_conversation_matches_itself_and_strangers_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system = tmp_path / "system"
    system.write_text(words(1, 1000))
    files = []
    for session in range(10):
        text = words(100 + session, 600)
        files.append(str(write(tmp_path / f"{session}.jsonl", text, text + " and now go on, please", text + words(session, 40))))
    assert main([*files, "--system-prompt", str(system), "--json"]) == 0
    rows = rows_of(capsys)
    assert (rows["num_prompts"], rows["num_pairs"], rows["stranger_share"]) == (30, 45, 0.0)
    assert rows["match_rate"] == pytest.approx(20 / 30)
    assert rows["half_prefix_share"] == 1.0


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": 5}\n')
    assert main([str(path)]) == 2
    assert f"{path}:1" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2


def test_an_empty_trace_has_no_matches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write(tmp_path / "empty.jsonl")), "--json"]) == 0
    assert rows_of(capsys)["match_rate"] == 0
