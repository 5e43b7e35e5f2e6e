"""Which prompts get which part of the next chunk. Plain Python over ints: no torch, no I/O."""

from __future__ import annotations

from services.prefill.job import Job
from shared.engine.batch import Batch, BatchItem
from shared.errors import OutOfBlocks
from shared.ewma import Ewma
from shared.kv.block_pool import BlockPool

LARGEST_CHUNK = 8192


class PrefillScheduler:
    """First come, first served; what a chunk has left after one prompt's end goes to the next prompt."""

    def __init__(self, pool: BlockPool, block_size: int, chunk_tokens: int, chunk_ms: float) -> None:
        self.pool = pool
        self.block_size = block_size
        self.jobs: dict[str, Job] = {}
        """In order of arrival."""
        self.tokens_per_s = Ewma()
        self.chunk_ms = Ewma()
        self._first_chunk_tokens = chunk_tokens
        self._target_chunk_ms = chunk_ms

    @property
    def chunk_tokens(self) -> int:
        """Tokens that take about `chunk_ms` at the measured rate, but never less than half of what it began with.

        A step costs something whatever it computes: the smaller the chunk, the lower the rate, and the smaller the next chunk.
        """
        if not self.tokens_per_s.value:
            return max(self._first_chunk_tokens, self.block_size)
        tokens = min(self.tokens_per_s.value * self._target_chunk_ms / 1000, LARGEST_CHUNK)
        return max(int(tokens), self._first_chunk_tokens // 2, self.block_size)

    @property
    def ms_per_token(self) -> float:
        """0 while unknown."""
        return 1000 / self.tokens_per_s.value if self.tokens_per_s.value else 0.0

    def add(self, job: Job) -> None:
        self.jobs[job.sequence.key] = job

    def place(self, job: Job) -> bool:
        """Give the job blocks for what it computes, those it finds cached included. False: not enough are free now."""
        num_blocks = job.num_target_tokens // self.block_size
        cached = self.pool.match_prefix(job.chain.hashes[:num_blocks]) if job.chain else []
        try:
            fresh = self.pool.allocate(num_blocks - len(cached))
        except OutOfBlocks:
            self.pool.free(cached)
            return False
        job.sequence.block_table = cached + fresh
        job.sequence.num_computed_tokens = job.num_cached_tokens = len(cached) * self.block_size
        job.is_placed = True
        return True

    def fits(self, job: Job) -> bool:
        """Whether the job could ever have its blocks."""
        return job.num_target_tokens // self.block_size <= self.pool.num_blocks

    def loaded(self, job: Job, num_blocks: int) -> None:
        """`num_blocks` more leading blocks came from the store."""
        self._advance(job, num_blocks * self.block_size)
        job.num_cached_tokens += num_blocks * self.block_size

    def catch_up(self, ready: list[Job]) -> list[tuple[Job, int, int]]:
        """What others have computed meanwhile, the next to compute need not: (job, first of these blocks, their end)."""
        budget, found = self.chunk_tokens, []
        for job in ready:
            if budget <= 0:
                break
            start = job.sequence.num_computed_tokens // self.block_size
            end = start + self._take_cached(job, start)
            if end > start:
                found.append((job, start, end))
            budget -= job.num_left_tokens
        return found

    def _take_cached(self, job: Job, start: int) -> int:
        """Cached blocks in the place of the job's own, from `start` on. Returns how many."""
        table = job.sequence.block_table
        hashes = job.chain.hashes[start : job.num_target_tokens // self.block_size] if job.chain else []
        cached = self.pool.match_prefix(hashes)
        self.pool.free(table[start : start + len(cached)])
        table[start : start + len(cached)] = cached
        job.sequence.num_computed_tokens += len(cached) * self.block_size
        job.num_cached_tokens += len(cached) * self.block_size
        return len(cached)

    def schedule(self, ready: list[Job]) -> Batch | None:
        """The next chunk, of jobs that are placed and loaded. Whose next block is in it for another waits, and catches up."""
        budget = self.chunk_tokens
        items = []
        computing: set[bytes] = set()
        for job in ready:
            start, count = job.sequence.num_computed_tokens, min(job.num_left_tokens, budget)
            if count < job.num_left_tokens:
                count -= (start + count) % self.block_size  # chunks end with a block
            if count <= 0 or job.chain is None:
                break
            hashes = job.chain.hashes[start // self.block_size : (start + count) // self.block_size]
            if hashes[0] in computing:
                continue
            computing.update(hashes)
            budget -= count
            items.append(BatchItem(job.sequence, count, False))
        return Batch(items) if items else None

    def commit(self, batch: Batch, step_ms: float) -> list[tuple[Job, int, int]]:
        """Take a chunk's results: (job, first new block, end of new blocks)."""
        self.chunk_ms.add(step_ms)
        self.tokens_per_s.add(batch.num_tokens / max(step_ms, 1e-3) * 1000)
        done = []
        for sequence, num_tokens, _ in batch.items:
            job = self.jobs[sequence.key]
            start = sequence.num_computed_tokens // self.block_size
            self._advance(job, num_tokens)
            done.append((job, start, sequence.num_computed_tokens // self.block_size))
        return done

    def remove(self, job: Job) -> None:
        """Forget a job in whatever state, blocks and all."""
        self.jobs.pop(job.sequence.key, None)
        self.pool.free(job.sequence.block_table)
        job.sequence.block_table = []

    @property
    def num_queued_tokens(self) -> int:
        return sum(job.num_left_tokens for job in self.jobs.values())

    def _advance(self, job: Job, num_tokens: int) -> None:
        assert job.chain is not None
        start = job.sequence.num_computed_tokens // self.block_size
        job.sequence.num_computed_tokens += num_tokens
        for index in range(start, job.sequence.num_computed_tokens // self.block_size):
            self.pool.cache(job.sequence.block_table[index], job.chain.hashes[index], job.chain.parent(index))
