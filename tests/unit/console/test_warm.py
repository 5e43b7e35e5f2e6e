"""The file of typical requests: what is no request is named by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.console.options import parse_options
from services.console.warm import MAX_REQUESTS, read_requests
from shared.errors import ConfigError

GOOD = '{"messages": [{"role": "user", "content": "hi"}]}'


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "warm.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_lines_are_requests_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    requests = read_requests(written(tmp_path, f'{GOOD}\n\n{{"prompt": "x", "top_p": 0.5}}\n'))
    assert [(number, sorted(body)) for number, body in requests] == [(1, ["messages"]), (3, ["prompt", "top_p"])]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{GOOD}\n{{", "line 2 is no JSON object"),
        (f"{GOOD}\n[1]", "line 2 is no JSON object"),
        (f'{GOOD}\n{GOOD}\n{{"x": 1}}', "line 3 has neither messages nor prompt"),
        ('{"prompt": 5}', "line 1 has neither"),
        ('{"messages": "hi"}', "line 1 has neither"),
        ("\n\n", "holds no request"),
        ((GOOD + "\n") * (MAX_REQUESTS + 1), "the limit is"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_what_is_no_request_is_named(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        parse_options(["--warm", str(written(tmp_path, text))])
    assert caught.value.exit_code == 2


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        parse_options(["--warm", str(tmp_path / "nothing")])


def test_workers_that_join_warm_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a gateway"):
        parse_options(["--only", "decode", "--warm", str(written(tmp_path, GOOD))])
