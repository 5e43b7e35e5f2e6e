"""The prefill scheduler: chunks end with blocks, the rest of a chunk goes to the next prompt, what is cached is not computed."""

from __future__ import annotations

from services.prefill.job import Job
from services.prefill.scheduler import PrefillScheduler
from shared.kv.block_pool import BlockPool
from shared.messages.request import PrefillTask
from shared.worker.chain import Chain
from tests.support.fake_delivery import FakeDelivery, make_request

BLOCK_SIZE = 4


def make(number: int, prompt: list[int]) -> Job:
    request = make_request(number, prompt)
    return Job(
        PrefillTask(request, "0" * 8, "1" * 8, "2" * 8, None), FakeDelivery(), Chain(bytes(32), request, BLOCK_SIZE, ()), BLOCK_SIZE, 0.0
    )


def place(scheduler: PrefillScheduler, *jobs: Job) -> None:
    for job in jobs:
        scheduler.add(job)
        assert scheduler.place(job)


def run(scheduler: PrefillScheduler, jobs: list[Job]) -> list[list[int]]:
    """Tokens of each chunk, until nothing is left."""
    chunks = []
    while True:
        scheduler.catch_up(jobs)
        batch = scheduler.schedule([job for job in jobs if job.num_left_tokens])
        if batch is None:
            return chunks
        chunks.append([item.num_tokens for item in batch.items])
        scheduler.commit(batch, 1e9)  # so slow that the measured chunk would be the smallest
        scheduler.tokens_per_s.value = 0.0


def test_only_full_blocks_before_the_last_token_are_computed() -> None:
    assert [make(0, list(range(length))).num_target_tokens for length in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]


def test_chunks_end_with_a_block_and_are_shared() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 10, 200.0)
    jobs = [make(0, list(range(100, 119))), make(1, list(range(200, 215)))]
    place(scheduler, *jobs)
    chunks = run(scheduler, jobs)
    assert [sum(chunk) for chunk in chunks] == [8, 8, 8, 4]
    assert all(tokens % BLOCK_SIZE == 0 for chunk in chunks for tokens in chunk)
    assert [job.num_left_tokens for job in jobs] == [0, 0]


def test_what_the_pool_has_is_not_computed_again() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 64, 200.0)
    first = make(0, list(range(100, 120)))
    place(scheduler, first)
    run(scheduler, [first])
    scheduler.remove(first)
    second = make(1, [*range(100, 112), *range(300, 310)])
    place(scheduler, second)
    assert second.num_cached_tokens == 12
    assert run(scheduler, [second]) == [[8]]


def test_what_another_computes_meanwhile_is_not_computed_again() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 8, 200.0)
    shared = list(range(100, 116))
    first, second, stranger = make(0, [*shared, 1]), make(1, [*shared, *range(300, 308), 2]), make(2, list(range(400, 405)))
    jobs = [first, second, stranger]
    place(scheduler, *jobs)
    assert run(scheduler, jobs) == [[8], [8], [8], [4]]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 16)
    assert second.sequence.block_table[:4] == first.sequence.block_table[:4]
    for job in jobs:
        scheduler.remove(job)
    assert scheduler.pool.num_used == 0


def test_in_one_chunk_no_block_is_computed_twice() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 64, 200.0)
    shared = list(range(100, 116))
    jobs = [make(0, [*shared, 1]), make(1, [*shared, *range(300, 308), 2]), make(2, list(range(400, 405)))]
    place(scheduler, *jobs)
    assert run(scheduler, jobs) == [[16, 4], [8]]


def test_without_room_nothing_is_taken() -> None:
    scheduler = PrefillScheduler(BlockPool(3), BLOCK_SIZE, 64, 200.0)
    first, second = make(0, list(range(100, 110))), make(1, list(range(200, 210)))
    place(scheduler, first)
    scheduler.add(second)
    assert not scheduler.place(second)
    assert scheduler.pool.num_free == 1
    scheduler.remove(first)
    assert scheduler.place(second)
    assert not scheduler.fits(make(2, list(range(100))))


def test_the_chunk_follows_the_measured_rate() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 64, 200.0)
    job = make(0, list(range(100, 165)))
    place(scheduler, job)
    batch = scheduler.schedule([job])
    assert batch is not None
    assert batch.num_tokens == 64
    scheduler.commit(batch, 320.0)  # 200 tokens a second
    assert scheduler.chunk_tokens == 40


def test_what_a_step_costs_by_itself_does_not_starve_the_chunks() -> None:
    """120 ms a step and 3 a token: by the rate alone, chunks would shrink to one block, at a third of the speed."""
    scheduler = PrefillScheduler(BlockPool(1024), BLOCK_SIZE, 256, 200.0)
    job = make(0, list(range(100, 3000)))
    place(scheduler, job)
    sizes = []
    while job.num_left_tokens:
        batch = scheduler.schedule([job])
        assert batch is not None
        sizes.append(batch.num_tokens)
        scheduler.commit(batch, 120.0 + 3.0 * batch.num_tokens)
    assert sizes[0] == 256 and set(sizes[2:-1]) == {128}


def test_a_chunk_is_a_block_at_least() -> None:
    """Else a slow worker with large blocks would never begin."""
    scheduler = PrefillScheduler(BlockPool(8), 32, 16, 200.0)
    assert scheduler.chunk_tokens == 32
    scheduler.tokens_per_s.add(1.0)
    assert scheduler.chunk_tokens == 32
    assert scheduler.ms_per_token == 1000


def test_blocks_are_given_to_the_store_in_chain_order() -> None:
    scheduler = PrefillScheduler(BlockPool(64), BLOCK_SIZE, 64, 200.0)
    job = make(0, list(range(100, 113)))
    place(scheduler, job)
    blocks = job.blocks(0, 3, BLOCK_SIZE)
    assert job.chain is not None
    assert [block.parent for block in blocks] == [job.chain.seed, blocks[0].hash, blocks[1].hash]
    assert [block.block_id for block in blocks] == job.sequence.block_table
