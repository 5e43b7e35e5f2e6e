"""The session under any interleaving of lost, doubled, reordered, stale, foreign messages: the client sees what was generated."""

from __future__ import annotations

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.gateway.session import Action, AskResend, Session, Submit, Tell
from shared.messages.request import GenerateRequest
from shared.messages.session import Finish, HeldRequest, TokenDelta
from shared.types import SamplingParams, pack_tokens, unpack_tokens

MAX_TOKENS = 12
SOURCE = [1000 + index for index in range(MAX_TOKENS)]
"""What any fault-free run generates."""


def first_request() -> GenerateRequest:
    return GenerateRequest(
        request_id="ab" * 16,
        epoch=0,
        gateway="0" * 8,
        model="0" * 16,
        request_class="normal",
        token_ids=pack_tokens([1, 2, 3]),
        num_emitted=0,
        sampling=SamplingParams(max_tokens=MAX_TOKENS),
        salt=bytes(32),
        partition="0" * 16,
        block_keys=b"",
        deadline_ms=600_000,
        sent_at_ns=0,
    )


class Worker:
    """Generates SOURCE from where its attempt begins."""

    def __init__(self, instance: str, request: GenerateRequest) -> None:
        self.instance = instance
        self.epoch = request.epoch
        self.start = request.num_emitted
        self.count = request.num_emitted
        emitted = unpack_tokens(request.token_ids)[3:]
        assert emitted == SOURCE[: self.start], "a resubmission must carry exactly what was accepted"
        assert request.sampling.max_tokens == MAX_TOKENS - self.start
        self.is_cancelled = False

    def delta(self, start: int, end: int) -> TokenDelta:
        return TokenDelta("ab" * 16, self.epoch, start, SOURCE[start:end])

    def finish(self) -> Finish:
        crc = zlib.crc32(pack_tokens(SOURCE))
        last = SOURCE[max(self.start, MAX_TOKENS - 2) :]
        return Finish("ab" * 16, self.epoch, self.instance, "length", MAX_TOKENS, crc, pack_tokens(last))


class Races(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.session = Session(first_request(), self.now_s)
        self.workers: list[Worker] = []
        self.attempts = [self.session.first]
        self.in_flight: list[tuple[str, TokenDelta]] = []
        self.num_ends = 0
        self.seen = 0

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Submit():
                    self.attempts.append(action.request)
                case Tell():
                    for worker in self.workers:
                        cancel = action.cancel
                        if worker.epoch <= cancel.epoch and cancel.worker in (None, worker.instance):
                            worker.is_cancelled = True
                case AskResend():
                    for worker in self.workers:
                        if worker.instance == action.instance:
                            self.in_flight.append((worker.instance, worker.delta(action.index, worker.count)))

    @rule(data=st.data())
    def take_an_attempt(self, data: st.DataObject) -> None:
        """Any attempt, also an old one, also a second time: JetStream and routers may do it twice."""
        if len(self.workers) < 6:
            request = data.draw(st.sampled_from(self.attempts))
            self.workers.append(Worker(f"{len(self.workers):08x}", request))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(1, 3), is_lost=st.booleans())
    def generate(self, data: st.DataObject, count: int, is_lost: bool) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.is_cancelled or worker.count == MAX_TOKENS:
            return
        start, worker.count = worker.count, min(worker.count + count, MAX_TOKENS)
        if not is_lost:
            self.in_flight.append((worker.instance, worker.delta(start, worker.count)))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data(), is_doubled=st.booleans())
    def deliver(self, data: st.DataObject, is_doubled: bool) -> None:
        index = data.draw(st.integers(0, len(self.in_flight) - 1))
        instance, delta = self.in_flight[index] if is_doubled else self.in_flight.pop(index)
        self.carry_out(self.session.on_tokens(instance, delta, self.now_s))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def say_progress(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        held = HeldRequest("ab" * 16, worker.epoch, "decode", worker.count)
        self.carry_out(self.session.on_progress(worker.instance, "decode", held, self.now_s))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(self.workers))
        if worker.count < MAX_TOKENS or worker.is_cancelled:
            return
        before = self.session.end
        reply, actions = self.session.on_finish(worker.finish(), self.now_s)
        self.carry_out(actions)
        if not reply.done:
            assert reply.resend_from == len(self.session.output)
            self.in_flight.append((worker.instance, worker.delta(reply.resend_from, worker.count)))
        self.num_ends += before is None and self.session.end is not None

    @rule(seconds=st.sampled_from([0.1, 0.5, 2.1]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        before = self.session.end
        self.carry_out(self.session.tick(self.now_s, has_router=True))
        self.num_ends += before is None and self.session.end is not None

    @invariant()
    def client_sees_the_source(self) -> None:
        output = self.session.output
        assert output == SOURCE[: len(output)]
        assert len(output) >= self.seen, "a token was taken back"
        self.seen = len(output)
        assert self.num_ends == (self.session.end is not None)
        end = self.session.end
        if end is not None and end.reason is not None:
            assert output == SOURCE
        if end is not None and end.error is not None:
            assert end.error.code == "worker_lost"


Races.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRaces = Races.TestCase
