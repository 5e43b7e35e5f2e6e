"""The decode scheduler on the simulated engine: whatever comes, in whatever order, with however few blocks, each text is the one that the
request would get alone; no block leaks, nobody starves, no step exceeds its limits."""

from __future__ import annotations

import zlib
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.budget import PrefillBudget
from services.decode.job import Job, State
from services.decode.scheduler import DecodeScheduler
from shared.engine.engine import EngineSpec
from shared.engine.simulated import Profile, SimulatedEngine
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout
from shared.messages.request import DecodeTask
from shared.types import pack_tokens
from shared.worker.chain import Chain
from tests.support.fake_delivery import FakeDelivery, make_request

BLOCK_SIZE = 4
MAX_SEQS = 4
BUDGET = 6
LAYOUT = KvLayout(num_layers=1, block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")


def make_engine(num_blocks: int) -> SimulatedEngine:
    spec = EngineSpec(
        model_name="sim",
        model_path="",
        model_digest=bytes(32),
        layout=LAYOUT,
        num_blocks=num_blocks,
        max_model_len=64,
        vocab_size=5000,
        eos_token_ids=[2],
        numerics="exact",
        device="sim",
        dtype="float32",
        weight_format="simulated",
        commits_blocks=True,
    )
    return SimulatedEngine(spec, Profile())


class Rig:
    """Scheduler and engine, stepped by hand. A load takes `load_steps` steps, and a block that became full is held for `copy_steps` more,
    as if it were on its way to the store."""

    def __init__(self, num_blocks: int, max_seqs: int = MAX_SEQS, load_steps: int = 0, copy_steps: int = 0) -> None:
        self.engine = make_engine(num_blocks)
        self.now_s = 0.0
        self.max_seqs = max_seqs
        self.load_steps = load_steps
        self.copy_steps = copy_steps
        self.loading: list[tuple[int, Job]] = []
        self.copying: list[tuple[int, list[int]]] = []
        self.num_steps = 0
        budget = PrefillBudget(BUDGET, 50.0)
        self.scheduler = DecodeScheduler(BlockPool(num_blocks), BLOCK_SIZE, max_seqs, 64, [2], budget, lambda: self.now_s)
        self.ended: dict[str, Job] = {}

    def add(self, number: int, prompt: list[int], max_tokens: int, num_emitted: int = 0, **sampling: object) -> Job:
        request = msgspec.structs.replace(make_request(number, prompt, max_tokens), num_emitted=num_emitted)
        request = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))
        chain = Chain(bytes(32), request, BLOCK_SIZE, ())
        job = Job(DecodeTask(request, "0" * 8, "1" * 8), FakeDelivery(), chain, self.now_s)
        self.scheduler.add(job)
        return job

    def step(self) -> bool:
        """One round of the loop; False: nothing to compute, now or later."""
        self.now_s += 0.01
        self.num_steps += 1
        was_busy_beside = bool(self.loading or self.copying)
        self.loading += [(self.num_steps + self.load_steps, job) for job in self.scheduler.place()]
        self.finish_beside()
        batch = self.scheduler.schedule()
        if batch is not None:
            self.check(batch.items)
            self.scheduler.commit(batch, self.engine.forward(batch))
            held = [self.scheduler.pool.match_prefix([block.hash]) for block in self.scheduler.take_full_blocks()]
            self.copying.append((self.num_steps + self.copy_steps, [block for blocks in held for block in blocks]))
            self.finish_beside()
        for job in [job for job in self.scheduler.jobs.values() if job.state is State.ENDED]:
            self.scheduler.remove(job)
            self.ended[job.sequence.key] = job
        self.scheduler.pool.check_integrity()
        return batch is not None or was_busy_beside or bool(self.loading)

    def finish_beside(self) -> None:
        """What runs beside the loop and is due."""
        for due, job in self.loading:
            if due <= self.num_steps and job.state is State.LOADING:
                self.scheduler.loaded(job, 0)
        for due, blocks in self.copying:
            if due <= self.num_steps:
                self.scheduler.pool.free(blocks)
        self.loading = [(due, job) for due, job in self.loading if due > self.num_steps]
        self.copying = [(due, blocks) for due, blocks in self.copying if due > self.num_steps]

    def cancel(self, job: Job) -> None:
        """As the service does: a load that is under way ends first."""
        self.loading = [(due, other) for due, other in self.loading if other is not job]
        self.scheduler.remove(job)

    def check(self, items: list[object]) -> None:
        assert len(self.scheduler.running) <= self.max_seqs
        prompts = [item.num_tokens for item in items if not (item.num_tokens == 1 and item.sample)]  # type: ignore[attr-defined]
        decoding = len(items) - len(prompts)
        assert sum(prompts) <= (self.scheduler.budget.num_tokens if decoding else self.scheduler.budget.num_idle_tokens)
        if decoding:
            assert len(prompts) <= max(self.max_seqs // 4, 1)


@cache
def alone(prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    rig = Rig(64)
    job = rig.add(0, list(prompt), max_tokens)
    while rig.step():
        pass
    return job.sequence.token_ids[len(prompt) :]


requests = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(1, 20), st.integers(1, 12), st.integers(0, 6)
    ),  # prefix family, length, max_tokens, steps before
    min_size=1,
    max_size=10,
)


@settings(max_examples=100, deadline=None)
@given(requests, st.integers(9, 24), st.sets(st.integers(0, 9), max_size=3), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5))
def test_every_text_is_the_one_it_would_be_alone(
    asked: list[tuple[int, int, int, int]], num_blocks: int, cancelled: set[int], max_seqs: int, load_steps: int, copy_steps: int
) -> None:
    rig = Rig(num_blocks, max_seqs, load_steps, copy_steps)
    jobs: list[tuple[Job, tuple[int, ...], int]] = []
    for number, (family, length, max_tokens, steps) in enumerate(asked):
        prompt = tuple(1000 * (family + 1) + index for index in range(length))
        jobs.append((rig.add(number, list(prompt), max_tokens), prompt, max_tokens))
        for _ in range(steps):
            rig.step()
        if number in cancelled:
            rig.cancel(jobs[number][0])
    for _ in range(4000):
        if not rig.step() and not rig.scheduler.jobs:
            break
    assert not rig.scheduler.jobs, "somebody starved"
    assert rig.scheduler.pool.num_used == 0
    for number, (job, prompt, max_tokens) in enumerate(jobs):
        if number in cancelled and job.sequence.key not in rig.ended:
            continue
        assert job.error is None
        output = job.sequence.token_ids[len(prompt) :]
        assert output == alone(prompt, max_tokens)[: len(output)]
        assert len(output) == max_tokens
        assert job.reason == "length"


def test_a_prompt_larger_than_the_pool_is_refused() -> None:
    rig = Rig(3)
    job = rig.add(0, list(range(1000, 1020)), 4)
    assert not rig.step()
    assert job.error is not None
    assert job.error.code == "no_workers"


def test_alone_with_a_full_pool_the_context_ends() -> None:
    rig = Rig(3)
    job = rig.add(0, list(range(1000, 1008)), 20)
    while rig.step():
        pass
    assert job.reason == "length"
    assert job.sequence.num_tokens == 3 * BLOCK_SIZE + 1
    assert rig.scheduler.pool.num_used == 0


def test_a_job_that_waits_for_a_slot_gives_its_blocks_to_one_that_runs() -> None:
    rig = Rig(5, max_seqs=1)
    first = rig.add(0, list(range(1000, 1008)), 11)
    rig.step()
    second = rig.add(1, list(range(2000, 2007)), 3)
    rig.step()
    assert second.state is State.READY
    while rig.step():
        pass
    assert first.sequence.token_ids[8:] == alone(tuple(range(1000, 1008)), 11)
    assert second.sequence.token_ids[7:] == alone(tuple(range(2000, 2007)), 3)
    assert rig.scheduler.take_preemptions() > 0
    assert rig.scheduler.take_preemptions() == 0
    assert [job.finish("1" * 8, 0.0).usage.num_cached_tokens for job in (first, second)] == [0, 0], "their own work is no cache hit"


def test_blocks_that_are_on_their_way_to_the_store_are_waited_for() -> None:
    rig = Rig(4, copy_steps=9)
    rig.add(0, list(range(2000, 2008)), 1)
    rig.step()
    late = rig.add(1, list(range(1000, 1005)), 8)
    while rig.step():
        pass
    assert late.sequence.token_ids[5:] == alone(tuple(range(1000, 1005)), 8)
    assert rig.num_steps > 10, "it grew before the copy was done"


@pytest.mark.parametrize(
    ("sampling", "num_more", "reason"),
    [({"stop_token_ids": [77]}, 0, "stop"), ({"min_tokens": 9, "stop_token_ids": [77]}, 4, "length"), ({}, 4, "length")],
)
def test_an_attempt_whose_end_was_reached_before_ends_at_once(sampling: dict[str, object], num_more: int, reason: str) -> None:
    """Its Finish was lost with its worker: what comes behind the end is no part of the text."""
    rig = Rig(64)
    job = rig.add(0, [1000, 1001, 1002, 1003, 77], 4, num_emitted=2, **sampling)
    while rig.step():
        pass
    assert (job.reason, job.num_new_tokens) == (reason, num_more)
    finish = job.finish("1" * 8, 0.0)
    assert (finish.reason, finish.num_output_tokens) == (reason, 2 + num_more)
    assert finish.crc32 == zlib.crc32(pack_tokens(job.sequence.token_ids[3:]))


def test_an_attempt_at_the_end_of_the_context_gets_no_token_more() -> None:
    rig = Rig(64)
    job = rig.add(0, list(range(1000, 1064)), 9, num_emitted=3)
    assert not rig.step()
    assert (job.reason, job.num_new_tokens) == ("length", 0)


def test_a_resubmission_goes_on_where_the_text_was() -> None:
    prompt = list(range(1000, 1010))
    whole = alone(tuple(prompt), 12)
    rig = Rig(64)
    job = rig.add(0, prompt + whole[:5], 7, num_emitted=5)
    while rig.step():
        pass
    assert job.sequence.token_ids[len(prompt) :] == whole
    delta = job.delta(0)
    assert (delta.index, delta.token_ids) == (5, whole[5:])


def test_steps_until_change_are_steps_of_the_same_batch() -> None:
    rig = Rig(64)
    rig.add(0, list(range(1000, 1005)), 10)
    rig.step()
    jump = rig.scheduler.steps_until_change()
    assert jump > 0
    before = [job.sequence.key for job in rig.scheduler.running]
    for _ in range(jump):
        rig.step()
        assert [job.sequence.key for job in rig.scheduler.running] == before
