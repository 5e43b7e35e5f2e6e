"""What cannot begin before its deadline is refused, by what was measured and not by a guess."""

from __future__ import annotations

import random

import pytest

from services.router.deadline import first_token_s, too_late
from services.router.decide import Decider, Decision
from services.router.index import PrefixIndex
from services.router.load import Loads
from shared.messages.fleet import WorkerLoad
from tests.support.fake_delivery import make_request
from tests.unit.router.test_decide import MODEL, A, P, lease

NUM_TOKENS = 1000


@pytest.fixture
def loads() -> Loads:
    made = Loads()
    made.lease(lease(A), True)
    return made


def measure(loads: Loads, worker: str, tokens_per_s: float, num_queued: int = 0) -> None:
    loads.report(WorkerLoad(worker, "decode", MODEL, 1, 0, 0, num_queued, 256, 0, prefill_tokens_per_s=tokens_per_s), 1.0)


def decide(loads: Loads, apart: bool = False) -> Decision:
    decider = Decider(PrefixIndex(), loads, "always" if apart else "never", random.Random(0))
    decision = decider.decide(make_request(1, list(range(NUM_TOKENS))))
    assert decision is not None and (decision.prefill_worker == P) == apart
    return decision


def test_an_idle_worker_needs_what_its_rate_says(loads: Loads) -> None:
    measure(loads, A, 500.0)
    assert first_token_s(decide(loads), loads) == pytest.approx(2.0)


def test_a_prefill_worker_first_computes_its_queue(loads: Loads) -> None:
    loads.lease(lease(P, "prefill"), True)
    measure(loads, P, 500.0, num_queued=3000)
    assert first_token_s(decide(loads, apart=True), loads) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("deadline_ms", "waited_s", "is_refused"), [(3000, 0.0, False), (1001, 0.0, False), (999, 0.0, True), (3000, 2.5, True)]
)
def test_only_what_is_late_at_twice_the_rate_is_refused(loads: Loads, deadline_ms: int, waited_s: float, is_refused: bool) -> None:
    measure(loads, A, 500.0)
    refusal = too_late(make_request(1, list(range(NUM_TOKENS)), deadline_ms=deadline_ms), waited_s, decide(loads), loads)
    assert (refusal is not None) == is_refused
    if refusal is not None:
        assert "about 2000 ms" in refusal.message and refusal.status == 429 and refusal.retry_after_s == pytest.approx(2.0)


def test_without_a_measurement_nothing_is_refused(loads: Loads) -> None:
    assert too_late(make_request(1, list(range(NUM_TOKENS)), deadline_ms=1), 0.0, decide(loads), loads) is None


def test_a_worker_that_is_gone_meanwhile_refuses_nobody(loads: Loads) -> None:
    measure(loads, A, 1.0)
    decision = decide(loads)
    loads.lease(lease(A), False)
    assert too_late(make_request(1, list(range(NUM_TOKENS)), deadline_ms=1), 0.0, decision, loads) is None


def test_a_refusal_tells_times_that_are_not_all_0(loads: Loads) -> None:
    measure(loads, A, 100_000.0)
    refusal = too_late(make_request(1, list(range(NUM_TOKENS)), deadline_ms=1), 0.0, decide(loads), loads)
    assert refusal is not None and "about 10 ms, and the deadline is in 1 ms" in refusal.message
