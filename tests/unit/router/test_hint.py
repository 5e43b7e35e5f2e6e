"""What similarity promises: blocks at the neighbour's decode worker, and at its prefill worker as long as it is computed there."""

from __future__ import annotations

import random
from typing import Any

from services.router.decide import Decider
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.similarity import Remembered, SimilarityIndex
from tests.support.fake_delivery import make_request
from tests.unit.router.test_decide import KEYS, lease

A, P, Q = "aaaaaaaa", "cccccccc", "dddddddd"
PROMPT = random.Random(1).choices(range(49_152), k=800)


class Rig:
    """A decode worker, two prefill workers, and a prompt that was sent to one of these."""

    def __init__(self) -> None:
        self.loads, self.similarity = Loads(), SimilarityIndex()
        for one in (lease(A), lease(P, "prefill"), lease(Q, "prefill")):
            self.loads.lease(one, True)
        self.decider = Decider(PrefixIndex(), self.loads, "always", random.Random(0), self.similarity)
        self.first = make_request(1, PROMPT, block_keys=b"".join(KEYS[:50]))
        hint = self.decide(self.first).hint
        remembered = Remembered(self.first.block_keys, A, P, self.first.msg_id)
        self.similarity.add(self.first.partition, self.first.model, hint.sketches, hint.version, remembered)

    def decide(self, request: Any) -> Any:
        return self.decider.decide(request)

    def follower(self) -> Any:
        return self.decide(make_request(2, PROMPT, block_keys=self.first.block_keys))


def test_a_follower_goes_where_its_blocks_are_nearly_computed() -> None:
    rig = Rig()
    rig.loads.book(rig.first.msg_id, P, Booking(0, 300, 1.0))
    decision = rig.follower()
    assert decision.hint.neighbour.num_blocks == 50
    assert decision.prefill_worker == P


def test_but_elsewhere_if_that_is_sooner() -> None:
    rig = Rig()
    rig.loads.book(rig.first.msg_id, P, Booking(0, 800, 1.0))
    rig.loads.book("other", P, Booking(0, 800, 1.0))
    assert rig.follower().prefill_worker == Q


def test_what_is_computed_no_more_is_not_counted_on() -> None:
    rig = Rig()
    rig.loads.book(rig.first.msg_id, P, Booking(0, 300, 1.0))
    rig.loads.release(rig.first.msg_id)
    rig.loads.book("other", P, Booking(0, 300, 1.0))
    assert rig.follower().prefill_worker == Q


def test_a_neighbours_worker_that_is_gone_holds_nothing() -> None:
    rig = Rig()
    rig.loads.book(rig.first.msg_id, P, Booking(0, 300, 1.0))
    rig.loads.lease(lease(P, "prefill"), False)
    assert rig.follower().prefill_worker == Q
