"""Loads and the choice: overlap wins inside the load window, bookings bound, disaggregation is conditional."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from services.router.config import Disaggregation
from services.router.decide import Decider
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.miss import miss_reason
from services.router.score import ClassWeights, Weights
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.kv import BlocksStored, KvEventBatch, KvSnapshot
from tests.support.fake_delivery import make_request

BLOCK = 16
MODEL = "0" * 16
A, B, P = "aaaaaaaa", "bbbbbbbb", "cccccccc"
KEYS = [bytes([number]) * 16 for number in range(64)]


def lease(instance: str, role: str = "decode", **fields: Any) -> WorkerLease:
    base = WorkerLease(
        instance, "decode", "w", "ready", 1, "0", 0, model=MODEL, max_num_seqs=8, num_blocks=256, block_size=BLOCK, prefill_budget=32
    )
    return msgspec.structs.replace(base, role=role, **fields)


class Rig:
    def __init__(self, *leases: WorkerLease, disaggregation: Disaggregation = "auto") -> None:
        self.index, self.loads = PrefixIndex(), Loads()
        for one in leases:
            self.loads.lease(one, True)
        self.decider = Decider(self.index, self.loads, disaggregation, random.Random(0))

    def hold(self, source: str, count: int, tier: Any = "device") -> None:
        assert self.index.install(source, [KvSnapshot(source, 1, 0, [BlocksStored(tier, b"", b"".join(KEYS[:count]))])])

    def decide(self, num_tokens: int, number: int = 1, **fields: Any) -> Any:
        request = make_request(number, list(range(num_tokens)), block_keys=b"".join(KEYS[: num_tokens // BLOCK]), **fields)
        return self.decider.decide(request)


def test_the_longest_prefix_wins() -> None:
    rig = Rig(lease(A), lease(B))
    rig.hold(B, 6)
    decision = rig.decide(200)
    assert (decision.decode_worker, decision.num_overlap_tokens, decision.num_uncached_tokens) == (B, 96, 104)


def test_a_hosts_blocks_count_for_all_its_workers() -> None:
    rig = Rig(lease(A, host="11111111"), lease(B, host="22222222"))
    rig.hold("22222222", 6, "dram")
    assert rig.decide(200).decode_worker == B


def test_the_last_token_is_never_taken_from_a_cache() -> None:
    rig = Rig(lease(A))
    rig.hold(A, 4)
    assert rig.decide(64).num_overlap_tokens == 48


def test_a_hot_prefix_spreads() -> None:
    rig = Rig(*(lease(f"{number:08x}", max_num_seqs=64, num_blocks=4096) for number in range(4)))
    rig.hold("00000000", 20)
    sent = []
    for number in range(80):
        decision = rig.decide(330, number)
        rig.loads.book(f"{number}", decision.decode_worker, Booking(1, 0, float(number)))
        sent.append(decision.decode_worker)
    counts = [sent.count(worker) for worker in set(sent)]
    assert len(counts) == 4
    assert max(counts) / (sum(counts) / 4) <= 1.3


def test_without_room_it_waits() -> None:
    rig = Rig(lease(A, max_num_seqs=1))
    for number in range(2):
        rig.loads.book(f"{number}", A, Booking(1, 0, 0.0))
    assert rig.decide(100) is None
    rig.loads.release("0", A)
    assert rig.decide(100) is not None
    rig.loads.book("big", A, Booking(255, 0, 0.0))
    assert rig.decide(100) is None


@pytest.mark.parametrize(
    ("disaggregation", "num_tokens", "apart"), [("auto", 40, False), ("auto", 600, True), ("never", 600, False), ("always", 40, True)]
)
def test_prefill_is_apart_when_it_pays(disaggregation: Disaggregation, num_tokens: int, apart: bool) -> None:
    rig = Rig(lease(A), lease(P, "prefill"), disaggregation=disaggregation)
    rig.loads.book("busy", A, Booking(4, 0, 0.0))
    decision = rig.decide(num_tokens)
    assert (decision.prefill_worker == P) is apart
    if apart:
        assert decision.num_decode_tokens <= BLOCK


def test_an_idle_decode_worker_does_it_itself() -> None:
    rig = Rig(lease(A), lease(P, "prefill"))
    assert rig.decide(600).prefill_worker is None


def test_cold_prompts_go_where_nothing_was_sent_for_longest() -> None:
    rig = Rig(lease(A), lease(B))
    rig.loads.book("1", A, Booking(0, 0, 5.0))
    rig.loads.release("1")
    assert rig.decide(100).decode_worker == B


def test_reports_correct_bookings_and_end_them() -> None:
    loads = Loads()
    loads.lease(lease(A), True)
    key = f"{1:032x}:0"
    loads.book(key, A, Booking(10, 100, 1.0))
    state = loads.workers[A]
    assert (state.num_used_blocks, state.num_queued_tokens, state.num_requests) == (10, 100, 1)
    loads.report(WorkerLoad(A, "decode", MODEL, 1, 1, 0, 40, 256, 12), 3.0)
    assert (state.num_used_blocks, state.num_queued_tokens) == (12, 40)
    loads.report(WorkerLoad(A, "decode", MODEL, 2, 0, 0, 0, 256, 0, ended=[EndedRequest(f"{1:032x}", 0)]), 4.0)
    assert (state.num_used_blocks, state.num_queued_tokens, state.num_requests) == (0, 0, 0)
    loads.report(WorkerLoad(A, "decode", MODEL, 1, 9, 9, 9, 256, 9), 5.0)
    assert state.num_requests == 0, "an older report says nothing"


def test_a_lost_worker_takes_its_bookings_with_it() -> None:
    loads = Loads()
    loads.lease(lease(A), True)
    loads.book("1", A, Booking(10, 100, 1.0))
    loads.lease(lease(A), False)
    loads.release("1")
    assert loads.workers == {}
    loads.lease(lease(A), True)
    assert loads.workers[A].num_used_blocks == 0


def test_ties_are_broken_at_random() -> None:
    rig = Rig(*(lease(f"{number:08x}") for number in range(4)))
    assert len({rig.decide(100).decode_worker for _ in range(60)}) == 4


def test_weights_without_sense_are_refused_and_the_last_good_stay() -> None:
    rig = Rig(lease(A, host="11111111"), lease(B, host="22222222"))
    shy = Weights(uncached_blocks=-1.0)
    rig.decider.use(ClassWeights(high=Weights(), normal=shy, batch=Weights()))
    for bad in (float("nan"), float("inf"), 1e9):
        with pytest.raises(ValueError, match="latency_s"):
            rig.decider.use(ClassWeights(high=Weights(), normal=Weights(), batch=Weights(latency_s=bad)))
    rig.hold("22222222", 6, "dram")
    assert rig.decide(200).decode_worker == A
    assert rig.decide(200, request_class="high").decode_worker == B


def test_a_decision_tells_what_it_weighed() -> None:
    rig = Rig(lease(A, host="11111111"), lease(B))
    rig.hold("11111111", 6, "dram")
    rig.hold(A, 2)
    decision = rig.decide(160)
    rig.loads.book("later", A, Booking(99, 99, 1.0))
    assert [(candidate.worker, candidate.score) for candidate in decision.candidates] == [(A, 8.0), (B, 20.0)]
    assert str(decision.candidates[0]) == f"{A}:8.0(uncached_blocks=4 load_blocks=4)"
    assert decision.num_known_blocks == 6


def test_many_holders_of_one_run() -> None:
    workers = [f"{number:08x}" for number in range(40)]
    rig = Rig(*map(lease, workers))
    for number, worker in enumerate(workers):
        rig.hold(worker, 3 + number % 2)
    assert rig.decide(160).num_overlap_blocks == 4


def test_lost_ends_are_forgotten_but_not_what_waits_at_prefill() -> None:
    loads = Loads()
    loads.lease(lease(A), True)
    loads.lease(lease(P, "prefill"), True)
    loads.book("lost", A, Booking(10, 100, 1.0))
    loads.book("prefilling", A, Booking(10, 0, 2.0))
    loads.book("prefilling", P, Booking(0, 500, 2.0))
    loads.book("fresh", A, Booking(10, 100, 19.0))
    loads.report(WorkerLoad(A, "decode", MODEL, 1, 0, 0, 0, 256, 0), 20.0)
    assert set(loads.workers[A].bookings) == {"prefilling", "fresh"}
    loads.report(WorkerLoad(P, "prefill", MODEL, 1, 0, 0, 0, 256, 0), 20.0)
    loads.report(WorkerLoad(A, "decode", MODEL, 2, 0, 0, 0, 256, 0), 21.0)
    assert set(loads.workers[A].bookings) == {"fresh"}


def test_what_was_booked_after_a_report_counts_on_top_of_it() -> None:
    loads = Loads()
    loads.lease(lease(A), True)
    loads.report(WorkerLoad(A, "decode", MODEL, 1, 3, 0, 0, 256, 50), 1.0)
    loads.book("1", A, Booking(10, 100, 2.0))
    assert loads.workers[A].num_used_blocks == 60
    loads.release("1")
    assert loads.workers[A].num_used_blocks == 50


def test_a_cancel_releases_every_attempt_up_to_it() -> None:
    loads = Loads()
    loads.lease(lease(A), True)
    for epoch in range(3):
        loads.book(f"x:{epoch}", A, Booking(1, 0, 1.0))
    loads.release_up_to("x", 1)
    assert set(loads.workers[A].bookings) == {"x:2"}


def test_every_miss_has_its_reason() -> None:
    rig = Rig(lease(A), lease(B))

    def reason(num_tokens: int, keys: list[bytes]) -> str:
        request = make_request(1, list(range(num_tokens)), block_keys=b"".join(keys))
        decision = rig.decider.decide(request)
        assert decision is not None
        return miss_reason(request, decision, rig.index)

    assert reason(10, []) == "shorter_than_block"
    assert reason(100, KEYS[:6]) == "cold"
    rig.hold(A, 6)
    assert reason(100, KEYS[:6]) == ""
    assert reason(100, [*KEYS[:3], *KEYS[40:43]]) == "diverged"
    rig.loads.book("busy", A, Booking(250, 4000, 1.0))
    assert reason(100, KEYS[:6]) == "elsewhere"
    rig.loads.release("busy")
    rig.index.drop(A)
    assert reason(100, KEYS[:6]) == "evicted"
    rig.hold(B, 6)
    assert not rig.index.apply(KvEventBatch(B, "worker", MODEL, 1, 9, []))
    assert reason(100, KEYS[10:16]) == "stale_index"
