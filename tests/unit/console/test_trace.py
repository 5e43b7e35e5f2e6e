import io
import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.console import trace
from services.console.__main__ import main
from services.console.run_folder import Run, create_run_folder, write_run
from services.console.terminal import Terminal
from services.console.trace import BAR, draw, find_trace, latest_calls, listed, read_names, read_spans
from shared.telemetry.trace_file import TraceLine

TRACE = "ab" * 16
MS = 1_000_000
PLAIN = Terminal(io.StringIO(), {})


def span(name: str, start_ms: float, end_ms: float, service: str = "gateway", **attributes: Any) -> TraceLine:
    parent = "" if "gen_ai.operation.name" in attributes else "call"
    span_id = "call" if not parent else name
    return TraceLine(TRACE, span_id, parent, name, service, f"{service}-id", int(start_ms * MS), int(end_ms * MS), attributes)


CALL = span(
    "chat m",
    0,
    100,
    outcome="stop",
    ttft_ms=12.5,
    num_migrations=1,
    **{
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.usage.output_tokens": 9,
    },
)
ROUTE = span(
    "router route",
    2,
    4,
    "router",
    decode_worker="d1",
    prefill_worker="",
    reason="decode is sooner",
    num_overlap_tokens=16,
    num_uncached_tokens=24,
    miss="diverged",
    similar_blocks=2,
    candidates="d1:1.5(uncached_blocks=1.5 memory_used=0.000793457) d2:2.0(uncached_blocks=2)",
)
GENERATE = span("decode generate", 50, 100, "decode-0", num_output_tokens=9, num_failed=0, reason="stop")


def test_bars_lie_where_the_stages_were() -> None:
    lines = draw([CALL, ROUTE, GENERATE], {}, PLAIN)
    bars = {line.split()[0]: line for line in lines if "█" in line or "▏" in line}
    assert "█" * BAR in bars["gateway"]
    assert "▏" not in bars["decode-0"] and "█" * (BAR // 2) in bars["decode-0"] and "█" * (BAR // 2 + 1) not in bars["decode-0"]
    assert bars["decode-0"].index("█") == bars["gateway"].index("█") + BAR // 2
    assert bars["router"].index("█") == bars["gateway"].index("█")
    assert "9 output tokens, stop" in bars["decode-0"], "what is 0 is not told"


def test_the_head_tells_tokens_first_token_and_moves() -> None:
    head = draw([CALL], {}, PLAIN)[0]
    assert head == f"trace {TRACE}  chat m · stop · 40 prompt tokens (16 cached) · 9 out · first after 12.5 ms · moved 1 times"


def test_the_routing_names_workers_and_rounds_features() -> None:
    lines = draw([CALL, ROUTE], {"d1": "decode-0"}, PLAIN)
    routing = lines[lines.index("routed to decode-0: decode is sooner") :]
    assert routing[1] == "  16 prompt tokens are there, 24 to compute (diverged) · a similar prompt has 2 blocks"
    assert routing[3].split() == ["✔", "decode-0", "1.5", "uncached_blocks=1.5", "memory_used=0.000793"]
    assert routing[4].split() == ["d2", "2.0", "uncached_blocks=2"], "one that never said its name keeps its id"


@pytest.mark.parametrize(("kind", "words"), [("time", "a date or a time"), ("text", "other text"), (None, "other text")])
def test_where_the_prompt_left_the_earlier_ones_is_told(kind: str | None, words: str) -> None:
    attributes = CALL.attributes | {"diverged_at": 32} | ({"diverged_kind": kind} if kind else {})
    lines = draw([msgspec.structs.replace(CALL, attributes=attributes), ROUTE], {}, PLAIN)
    assert lines[-1] == f"the prompt leaves the earlier ones at token 32: there stands {words}"


def test_a_trace_whose_call_is_missing_is_drawn_all_the_same() -> None:
    lines = draw([GENERATE], {}, PLAIN)
    assert "has not ended" in lines[0] and any("decode-0" in line for line in lines)


def test_a_span_of_no_length_does_not_divide_by_zero() -> None:
    assert any("▏" in line for line in draw([span("router route", 5, 5, "router")], {}, PLAIN))


def write(folder: Path, name: str, *spans: TraceLine, tail: bytes = b"") -> None:
    lines = [json.dumps({field: getattr(one, field) for field in one.__struct_fields__}).encode() + b"\n" for one in spans]
    (folder / name).write_bytes(b"".join(lines) + tail)


def test_spans_of_all_files_are_found_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, "gateway.jsonl.1", CALL)
    write(tmp_path, "router.jsonl", ROUTE, tail=b'{"trace_id":"ab')
    write(tmp_path, "decode-0.jsonl", GENERATE)
    assert len(list(read_spans(tmp_path))) == 3
    for asked in ("last", TRACE, TRACE[:8]):
        assert [one.name for one in find_trace(tmp_path, asked)] == ["chat m", "router route", "decode generate"]


def test_the_list_has_a_line_a_call_that_fits() -> None:
    refused = span("chat m", 0, 7, outcome="queue_full", **{"gen_ai.operation.name": "chat"})
    head, shed, line = listed(latest_calls([CALL, ROUTE, refused]), 100)
    assert head.split() == ["trace", "at", "call", "ended", "ms", "prompt", "cached", "out", "first", "ms"]
    assert line.split()[2:] == ["chat", "m", "stop", "100.0", "40", "16", "9", "12.5"]
    assert "queue_full (refused)" in shed
    assert max(map(len, listed([CALL], 60))) <= 60


def test_names_come_from_the_logs(tmp_path: Path) -> None:
    (tmp_path / "decode-0.log").write_text(
        'a library speaks\n{"service":"decode-0","instance":"d1","message":"ready"}\n{"service":"decode-0","instance":"d9"}\n'
    )
    assert read_names(tmp_path) == {"d1": "decode-0", "d9": "decode-0"}


@pytest.mark.parametrize(("environ", "has_colour"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)])
def test_colours_only_where_they_are_wanted(environ: dict[str, str], has_colour: bool) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert ("\x1b" in "".join(draw([CALL, ROUTE], {}, Terminal(Screen(), environ)))) is has_colour


def test_the_last_trace_is_waited_for_until_it_is_whole_though_newer_ones_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under load there is always a newer call, whose workers have not written yet."""
    now_ns = time.time_ns()
    call, route, generate = (
        msgspec.structs.replace(one, start_ns=now_ns - 2_000_000_000, end_ns=now_ns - 1_000_000_000) for one in (CALL, ROUTE, GENERATE)
    )
    write(tmp_path, "gateway.jsonl", call)
    write(tmp_path, "router.jsonl", route)

    def meanwhile(_: float) -> None:
        write(tmp_path, "decode-0.jsonl", generate)
        newer = msgspec.structs.replace(call, trace_id="f" * 32, end_ns=time.time_ns())
        write(tmp_path, "gateway.jsonl", call, newer)

    monkeypatch.setattr(trace.time, "sleep", meanwhile)
    assert {one.name for one in find_trace(tmp_path, "last")} == {"chat m", "router route", "decode generate"}


def test_on_a_narrow_terminal_no_line_is_too_wide_and_nothing_is_lost() -> None:
    narrow = Terminal(io.StringIO(), {})
    narrow.columns = 80
    many = "d1:1.5(" + " ".join(f"feature_{number}=0.125" for number in range(9)) + ") d2:2.0(uncached_blocks=2)"
    told = msgspec.structs.replace(ROUTE, attributes=ROUTE.attributes | {"candidates": many})
    generate = msgspec.structs.replace(GENERATE, attributes={f"num_{'long_' * 3}things_{number}": 7 for number in range(3)})
    lines = draw([CALL, told, generate], {"d1": "decode-3fa2b1"}, narrow)
    assert max(map(len, lines)) <= 80, lines
    words = " ".join(" ".join(lines).split())
    assert all(f"feature_{number}=0.125" in words for number in range(9))
    assert all(f"7 long long long things {number}" in words for number in range(3))


def test_the_latest_calls_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = create_run_folder(tmp_path)
    write_run(Run(folder=folder, pid=0, pid_start=0, version="1", namespace="ss", nats_url=""))
    (folder / "traces").mkdir()
    assert main(["trace", "--state-dir", str(tmp_path)]) == 1
    assert f"no request has been traced in {folder}" in capsys.readouterr().err
    (folder / "traces" / "gateway.jsonl").write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in (CALL, ROUTE)))
    assert main(["trace", "--list", "--json", "--state-dir", str(tmp_path)]) == 0
    [call] = json.loads(capsys.readouterr().out)
    assert call["trace_id"] == CALL.trace_id
