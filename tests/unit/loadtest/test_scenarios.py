"""The scenarios in small: everything ends, the same seed gives the same, and policies differ as they must."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadtest.scenarios import __main__ as command
from loadtest.scenarios.fleet import Cache, Shape, Simulation
from loadtest.scenarios.oracle import oracle_reuse, oracle_ttft_s
from loadtest.scenarios.policies import POLICIES
from loadtest.scenarios.workload import from_traces, nothing_shared, shared_prefix, shared_prefix_again
from tests.unit.loadtest.test_similarity import words, write

KEYS = [bytes([number]) * 16 for number in range(10)]


def test_suffixes_leave_the_cache_before_their_parents() -> None:
    cache = Cache(4)
    assert cache.store(KEYS[:3]) == (KEYS[:3], [])
    assert cache.store(KEYS[5:7])[1] == [KEYS[2]]
    assert (cache.overlap(KEYS[:3]), cache.overlap(KEYS[5:7]), cache.overlap(KEYS[8:])) == (2, 2, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_and_a_seed_is_a_run(policy: str) -> None:
    prompts = shared_prefix(3, num_groups=10, group_size=4, prefix_tokens=600, question_tokens=100)
    first, again = (Simulation(policy, prompts, 20.0, Shape(), 5).run() for _ in range(2))
    assert first.num_requests == 40
    assert msgspec.structs.replace(first, policy="") == msgspec.structs.replace(again, policy="")


def test_affinity_reuses_more_than_chance_and_no_more_than_the_oracle() -> None:
    prompts = shared_prefix(3, num_groups=20, group_size=5, prefix_tokens=1600, question_tokens=160)
    shape = Shape(num_blocks=2000)
    reuse = {policy: Simulation(policy, prompts, 5.0, shape, 5).run().reuse for policy in ("random", "exact", "exact+similarity")}
    assert reuse["random"] + 0.1 < reuse["exact"] <= oracle_reuse(prompts, shape) + 0.02
    assert reuse["exact+similarity"] >= reuse["exact"] - 0.02


def test_the_oracle_is_sooner_than_any_policy_and_no_sooner_than_computing_takes() -> None:
    prompts, shape = shared_prefix(3, num_groups=20, group_size=5, prefix_tokens=1600, question_tokens=160), Shape()
    ttft_s = oracle_ttft_s(prompts, 25.0, shape, 5)
    assert len(ttft_s) == 100
    assert min(ttft_s) == pytest.approx(160 / shape.prefill_tokens_per_s + shape.step_s)
    for policy in POLICIES:
        outcome = Simulation(policy, prompts, 25.0, shape, 5).run()
        assert np.percentile(ttft_s, 90) <= outcome.ttft_p90_s
        assert np.percentile(ttft_s, 50) <= outcome.ttft_p50_s


def test_the_oracle_has_what_was_asked_to_warm_up() -> None:
    first, again = shared_prefix_again(3, num_groups=5, group_size=4, prefix_tokens=1600, question_tokens=160)
    ttft_s = oracle_ttft_s(again, 0.1, Shape(), 5, first)
    assert ttft_s == pytest.approx([160 / Shape().prefill_tokens_per_s + Shape().step_s] * 20)


def test_nothing_is_reused_where_nothing_is_shared() -> None:
    assert Simulation("exact", nothing_shared(1, 20, 300), 5.0, Shape(), 5).run().reuse == 0


def test_what_was_asked_to_warm_up_is_there_and_is_not_counted() -> None:
    first, again = shared_prefix_again(3, num_groups=5, group_size=4, prefix_tokens=1600, question_tokens=160)
    assert {prompt.packed[:6400] for prompt in first} == {prompt.packed[:6400] for prompt in again}
    assert not {prompt.packed for prompt in first} & {prompt.packed for prompt in again}
    cold = Simulation("exact", first, 5.0, Shape(), 5).run()
    warm = Simulation("exact", again, 5.0, Shape(), 5, first).run()
    assert (cold.num_requests, warm.num_requests) == (20, 20)
    assert cold.reuse < 1600 / 1760 * 0.8 < 1600 / 1760 - 0.02 < warm.reuse


def test_a_sessions_next_prompt_waits_for_its_answer(tmp_path: Path) -> None:
    text = words(1, 300)
    path = write(tmp_path / "a.jsonl", text, text + " more", text + " more and more")
    outcome = Simulation("exact", from_traces([path]), 1000.0, Shape(), 5).run()
    assert outcome.num_requests == 3
    assert outcome.reuse > 0.6


def test_a_bad_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "compare", lambda *_: {})
    monkeypatch.setattr(command, "measure", lambda _seed, traces: from_traces(traces))
    assert command.main(["--trace", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err


def test_seeds_are_told_by_their_median_and_range() -> None:
    found = command.medians([[command.Row("a", value, "x")] for value in (3.0, 1.0, 8.0)])
    assert found == [command.Row("a", 3.0, "x", least=1.0, most=8.0)]


def test_no_seeds_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "measure", lambda seed, _traces: ({}, [command.Row("a", float(seed), "x")]))
    assert command.main(["--seeds", "0"]) == 0
    assert "1.00 x" in capsys.readouterr().out
