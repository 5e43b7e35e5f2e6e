"""What a step may compute of prompts follows what steps were measured to cost."""

from __future__ import annotations

import pytest

from services.decode.budget import FIRST_IDLE_TOKENS, LARGEST, LEAST_IDLE_TOKENS, SMALLEST, PrefillBudget


def measured(decode_ms: float, ms_per_token: float, target_itl_ms: float = 50.0) -> PrefillBudget:
    budget = PrefillBudget(32, target_itl_ms)
    for _ in range(50):
        budget.observe(decode_ms, 0, 4)
        budget.observe(decode_ms + 32 * ms_per_token, 32, 4)
    return budget


def test_it_begins_as_it_was_set() -> None:
    budget = PrefillBudget(32, 50.0)
    assert (budget.num_tokens, budget.num_idle_tokens) == (32, FIRST_IDLE_TOKENS)
    budget.observe(10.0, 0, 4)
    assert budget.num_tokens == 32, "half of what is needed is known"


@pytest.mark.parametrize(
    ("decode_ms", "ms_per_token", "num_tokens"),
    [(10.0, 0.5, 80), (40.0, 0.5, 20), (45.0, 2.0, SMALLEST), (80.0, 0.5, SMALLEST), (1.0, 0.001, LARGEST)],
)
def test_it_fills_what_the_target_leaves(decode_ms: float, ms_per_token: float, num_tokens: int) -> None:
    assert measured(decode_ms, ms_per_token).num_tokens == pytest.approx(num_tokens, abs=1)


def test_a_step_in_which_nothing_decodes_takes_200_ms() -> None:
    assert measured(10.0, 1.0).num_idle_tokens == pytest.approx(200, abs=1)
    assert measured(10.0, 0.5).num_idle_tokens == pytest.approx(400, abs=1)
    assert measured(1.0, 0.001).num_idle_tokens == LARGEST
    assert measured(1.0, 0.2, target_itl_ms=500.0).num_idle_tokens == LARGEST, "never less than beside decoding ones"


def test_what_a_step_costs_by_itself_does_not_starve_it() -> None:
    """120 ms a step and 3 a token."""
    budget = PrefillBudget(32, 50.0)
    for _ in range(100):
        budget.observe(120.0 + 3.0 * budget.num_idle_tokens, budget.num_idle_tokens, 0)
    assert budget.num_idle_tokens == LEAST_IDLE_TOKENS


def test_a_prompt_alone_is_measured_whole_and_a_short_rest_is_not() -> None:
    budget = PrefillBudget(32, 50.0)
    budget.observe(100.0, 200, 0)
    assert budget.ms_per_token.value == pytest.approx(0.5)
    budget.observe(100.0, SMALLEST - 1, 0)
    assert budget.ms_per_token.value == pytest.approx(0.5)
