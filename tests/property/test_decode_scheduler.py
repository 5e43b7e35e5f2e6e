"""The decode scheduler on the simulated engine: whatever comes, in whatever order, with however few blocks, each text is the one that the
request would get alone; no block leaks, nobody starves, no step exceeds its limits."""

from __future__ import annotations

from functools import cache

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.budget import PrefillBudget
from services.decode.job import Job, State
from services.decode.scheduler import IDLE_CHUNK, DecodeScheduler
from shared.engine.engine import EngineSpec
from shared.engine.simulated import Profile, SimulatedEngine
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout
from shared.messages.request import DecodeTask
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
    """Scheduler and engine, stepped by hand."""

    def __init__(self, num_blocks: int) -> None:
        self.engine = make_engine(num_blocks)
        self.now_s = 0.0
        budget = PrefillBudget(BUDGET, 50.0)
        self.scheduler = DecodeScheduler(BlockPool(num_blocks), BLOCK_SIZE, MAX_SEQS, 64, [2], budget, lambda: self.now_s)
        self.ended: dict[str, Job] = {}

    def add(self, number: int, prompt: list[int], max_tokens: int, num_emitted: int = 0) -> Job:
        request = msgspec.structs.replace(make_request(number, prompt, max_tokens), num_emitted=num_emitted)
        chain = Chain(bytes(32), request, BLOCK_SIZE, ())
        job = Job(DecodeTask(request, "0" * 8, "1" * 8), FakeDelivery(), chain, self.now_s)
        self.scheduler.add(job)
        return job

    def step(self) -> bool:
        """One round of the loop; False: nothing to compute."""
        self.now_s += 0.01
        for job in self.scheduler.place():
            self.scheduler.loaded(job, 0)
        batch = self.scheduler.schedule()
        if batch is not None:
            self.check(batch.items)
            self.scheduler.commit(batch, self.engine.forward(batch))
            self.scheduler.take_full_blocks()
        for job in [job for job in self.scheduler.jobs.values() if job.state is State.ENDED]:
            self.scheduler.remove(job)
            self.ended[job.sequence.key] = job
        self.scheduler.pool.check_integrity()
        return batch is not None

    def check(self, items: list[object]) -> None:
        assert len(self.scheduler.running) <= MAX_SEQS
        prompts = [item.num_tokens for item in items if not (item.num_tokens == 1 and item.sample)]  # type: ignore[attr-defined]
        decoding = len(items) - len(prompts)
        assert sum(prompts) <= (self.scheduler.budget.num_tokens if decoding else max(IDLE_CHUNK, BUDGET))
        if decoding:
            assert len(prompts) <= max(MAX_SEQS // 4, 1)


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


@settings(max_examples=60, deadline=None)
@given(requests, st.integers(9, 24), st.sets(st.integers(0, 9), max_size=3))
def test_every_text_is_the_one_it_would_be_alone(asked: list[tuple[int, int, int, int]], num_blocks: int, cancelled: set[int]) -> None:
    rig = Rig(num_blocks)
    jobs: list[tuple[Job, tuple[int, ...], int]] = []
    for number, (family, length, max_tokens, steps) in enumerate(asked):
        prompt = tuple(1000 * (family + 1) + index for index in range(length))
        jobs.append((rig.add(number, list(prompt), max_tokens), prompt, max_tokens))
        for _ in range(steps):
            rig.step()
        if number in cancelled:
            rig.scheduler.remove(jobs[number][0])
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
