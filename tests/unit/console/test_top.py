import io

import pytest

from services.console.figures import Look, figures
from services.console.pages import Pages
from services.console.terminal import Terminal
from services.console.top import screen
from shared.messages.fleet import WorkerLease, WorkerLoad
from shared.telemetry.scrape import parse_page, quantile

DECODE = WorkerLease("d1", "decode", "decode-0", "ready", 1, "1", 0)
LOAD = WorkerLoad("d1", "decode", "m", 1, 3, 1, 0, 100, 25, step_ms=8.25)


def look(at_s: float, text: str = "", silent: tuple[str, ...] = ()) -> Look:
    return Look(at_s, [DECODE], {"d1": LOAD}, Pages({"decode-0": ("decode", parse_page(text))}, list(silent)))


def counters(**values: float) -> str:
    """Names without their `slipstream_`, colons as two underscores."""
    return "".join(f"{name.replace('__', ':')} {value}\n" for name, value in values.items())


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = look(10.0, counters(slipstream_requests_total=5, vllm__generation_tokens_total=100, process_cpu_seconds_total=1))
    after = look(12.0, counters(slipstream_requests_total=9, vllm__generation_tokens_total=300, process_cpu_seconds_total=1.5))
    told = figures(before, after)
    assert (told["requests_per_s"], told["output_tokens_per_s"]) == (2.0, 100.0)
    assert told["services"][0]["cpu_share"] == 0.25
    assert told["hit_rate"] is None and told["ttft_ms"]["p50"] is None, "nothing happened, so nothing is told"


def test_a_process_that_was_restarted_makes_no_negative_rate() -> None:
    assert figures(look(0, counters(slipstream_requests_total=9)), look(1, counters(slipstream_requests_total=1)))["requests_per_s"] == 0


def test_the_hit_rate_is_of_the_prompts_in_between() -> None:
    before = look(0, counters(vllm__prefix_cache_queries_total=1000, vllm__prefix_cache_hits_total=0))
    after = look(1, counters(vllm__prefix_cache_queries_total=1100, vllm__prefix_cache_hits_total=75))
    assert figures(before, after)["hit_rate"] == 0.75


def test_a_quantile_lies_inside_its_bucket() -> None:
    before, after = {0.1: 5.0, 0.2: 5.0, float("inf"): 5.0}, {0.1: 15.0, 0.2: 25.0, float("inf"): 25.0}
    assert quantile(before, after, 0.5) == pytest.approx(0.1)
    assert quantile(before, after, 0.75) == pytest.approx(0.15)
    assert quantile(after, after, 0.5) is None


def test_the_screen_shows_load_pool_and_tiers() -> None:
    tier = {"used_bytes": 32, "bytes": 64, "blocks": 4}
    tiers = "".join(f'slipstream_kv_tier_{name}{{tier="dram"}} {value}\n' for name, value in tier.items())
    lines = screen(look(0, tiers), look(1, tiers, silent=("router",)), "http://x", Terminal(io.StringIO(), {}))
    [row] = [line for line in lines if line.startswith("decode-0")]
    assert row.split()[:7] == ["decode-0", "ready", "3", "1", "25%", "of", "100"] and "8.2 ms" in row
    [dram] = [line for line in lines if line.startswith("dram")]
    assert "███████░░░░░░░" in dram and "32 B of 64 B" in dram
    assert any("no /metrics from router" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_what_changes_from_look_to_look_moves_nothing_beside_it() -> None:
    page = counters(slipstream_decode_running=3, slipstream_requests_total=99_999, vllm__generation_tokens_total=99_999)
    idle, loaded = (screen(look(0), look(1, text), "", Terminal(io.StringIO(), {})) for text in ("", page))
    assert len(idle) == len(loaded)
    for before, after in zip(idle[1:], loaded[1:], strict=True):
        assert [at for at, sign in enumerate(before) if sign == "·"] == [at for at, sign in enumerate(after) if sign == "·"]


def test_a_process_that_is_missing_is_named() -> None:
    assert "! not ready: decode-0, router" in screen(look(0), look(1), "", Terminal(io.StringIO(), {}), ["decode-0", "router"])


def test_errors_and_moves_stand_out_only_where_they_happen() -> None:
    quiet = screen(look(0), look(1), "", Terminal(io.StringIO(), {}))
    after = look(1, 'slipstream_http_errors_total 4\nslipstream_session_events_total{event="migrated"} 2\n')
    loud = screen(look(0), after, "", Terminal(io.StringIO(), {}))
    assert not any("errors" in line or "moved" in line for line in quiet)
    assert any("4.0/s errors" in line and "2.0/s moved" in line for line in loud)
