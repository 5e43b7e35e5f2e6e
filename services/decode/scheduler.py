"""Continuous batching: which sequences have blocks, which run, what a step computes. Plain Python over ints: no torch, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.decode.budget import PrefillBudget
from services.decode.job import Job, State
from shared.engine.batch import Batch, BatchItem
from shared.engine.engine import Sampled
from shared.errors import NoCapacity, OutOfBlocks
from shared.kv.block_pool import BlockPool
from shared.kv.slot_copy import BlockToStore
from shared.types import FinishReason, pack_tokens

AGEING_TOKENS_PER_S = 256.0
"""A prompt that waits one second counts as so much shorter."""


class DecodeScheduler:
    """Owns the pool's blocks on behalf of the jobs. Every job that leaves (`remove`) has given its blocks back."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        budget: PrefillBudget,
        monotonic: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._monotonic = monotonic
        self.jobs: dict[str, Job] = {}
        """Everything not ended, in order of arrival, preempted ones included."""
        self.running: list[Job] = []
        self._num_preemptions = 0
        self._full_blocks: list[BlockToStore] = []

    # -- admit ---------------------------------------------------------------------------------------------------------
    def add(self, job: Job) -> None:
        """Take a job. One whose earlier attempt had come to its end (only its Finish was lost) ends at once."""
        self.jobs[job.sequence.key] = job
        if job.request.num_emitted:
            reason = self._reason_to_stop(job, job.sequence.token_ids[-1])
            if reason is not None:
                self._end(job, reason)

    def place(self) -> list[Job]:
        """Give blocks to waiting jobs, in order of arrival, as far as they reach. The placed are LOADING: the caller loads their prefix
        into the blocks and says `loaded`. A job that could never have its blocks ends with an error."""
        placed = []
        for job in [job for job in self.jobs.values() if job.state is State.WAITING]:
            if self._blocks_for(job.sequence.num_tokens + 1) > self.pool.num_blocks:
                job.error = NoCapacity(f"the prompt needs more than the worker's {self.pool.num_blocks} blocks")
                self.fail(job)
                continue
            if not self._place(job):
                break
            placed.append(job)
        return placed

    def _place(self, job: Job) -> bool:
        sequence = job.sequence
        hashes = job.chain.hashes[: (sequence.num_tokens - 1) // self.block_size] if job.chain else []
        cached = self.pool.match_prefix(hashes)
        try:
            fresh = self.pool.allocate(self._blocks_for(sequence.num_tokens + 1) - len(cached))
        except OutOfBlocks:
            self.pool.free(cached)
            return False
        sequence.block_table = cached + fresh
        sequence.num_computed_tokens = len(cached) * self.block_size
        if not job.was_preempted:
            job.num_device_tokens = sequence.num_computed_tokens
        job.num_cached_blocks = len(cached)
        job.state = State.LOADING
        return True

    def loaded(self, job: Job, num_blocks: int) -> None:
        """`num_blocks` more leading blocks of the job lie in the pool now."""
        job.sequence.num_computed_tokens += num_blocks * self.block_size
        if not job.was_preempted:
            job.num_loaded_tokens += num_blocks * self.block_size
        job.state = State.READY
        self._cache_full_blocks(job)

    # -- schedule ------------------------------------------------------------------------------------------------------
    def schedule(self) -> Batch | None:
        """The next step: every decoding sequence's one token, and prompt tokens within the budget. None: nothing to compute."""
        self._fill_slots()
        decoding = self._decoding_with_blocks()
        items = [BatchItem(job.sequence, 1, True) for job in decoding]
        budget = self.budget.num_tokens if decoding else self.budget.num_idle_tokens
        for job in self._computing_prompts(bool(decoding)):
            count = min(job.sequence.num_uncomputed_tokens, budget)
            if count == 0:
                break
            budget -= count
            items.append(BatchItem(job.sequence, count, count == job.sequence.num_uncomputed_tokens))
        return Batch(items) if items else None

    def _fill_slots(self) -> None:
        for job in self.jobs.values():
            if len(self.running) >= self.max_num_seqs:
                return
            if job.state is State.READY:
                job.state = State.RUNNING
                job.started_s = self._monotonic()
                self.running.append(job)

    def _decoding_with_blocks(self) -> list[Job]:
        """Running sequences past their prompt, each with a block for its next token. Those without one sit this step out."""
        decoding: list[Job] = []
        for job in list(self.running):
            sequence = job.sequence
            if job.state is not State.RUNNING or len(sequence.token_ids) - sequence.num_computed_tokens != 1:
                continue
            if len(sequence.block_table) * self.block_size >= len(sequence.token_ids) or self._grow(job):
                decoding.append(job)
        return [job for job in decoding if job.state is State.RUNNING]

    def _grow(self, job: Job) -> bool:
        sequence = job.sequence
        while len(sequence.block_table) * self.block_size < len(sequence.token_ids):
            try:
                sequence.block_table += self.pool.allocate(1)
            except OutOfBlocks:
                if len(sequence.block_table) == self.pool.num_blocks:
                    self._end(job, "length")  # the whole pool is its own: the context ends here
                    return False
                victim = self._victim(job)
                if victim is not None:
                    self._preempt(victim)
                if victim is None or victim is job:
                    return False
        return True

    def _victim(self, job: Job) -> Job | None:
        """Who gives its blocks to `job`: whoever waits for a slot, else whoever got one last. None: what is missing is held by loads and
        copies under way, which end."""
        ready = [other for other in self.jobs.values() if other.state is State.READY]
        if ready:
            return ready[-1]
        return self.running[-1] if len(self.running) > 1 else None

    def _preempt(self, job: Job) -> None:
        """Give up the job's blocks; it will be computed again (mostly found in the prefix cache) when there is room."""
        self._num_preemptions += 1
        job.was_preempted = True
        if job in self.running:
            self.running.remove(job)
        self._release(job)
        job.state = State.WAITING

    def _computing_prompts(self, is_decoding: bool) -> list[Job]:
        """Shortest remainder first, with ageing; beside decoding sequences at most a quarter of the slots."""
        now_s = self._monotonic()
        prompts = [job for job in self.running if job.sequence.num_uncomputed_tokens > 1]
        prompts.sort(key=lambda job: job.sequence.num_uncomputed_tokens - AGEING_TOKENS_PER_S * (now_s - job.started_s))
        return prompts[: max(self.max_num_seqs // 4, 1)] if is_decoding else prompts

    # -- commit --------------------------------------------------------------------------------------------------------
    def commit(self, batch: Batch, sampled: list[Sampled]) -> list[Job]:
        """Take a step's results. Returns the jobs that have a new token (or ended); cancelled ones take nothing."""
        tokens = iter(sampled)
        changed = []
        for sequence, num_tokens, sample in batch.items:
            token = next(tokens) if sample else None
            job = self.jobs.get(sequence.key)
            if job is None or job.state is not State.RUNNING or job.sequence is not sequence:
                continue
            if sequence.num_computed_tokens < job.num_prefix_tokens:
                job.num_computed_prompt_tokens += min(job.num_prefix_tokens - sequence.num_computed_tokens, num_tokens)
            sequence.num_computed_tokens += num_tokens
            if token is not None:
                job.append(token)
                changed.append(job)
                job.reason = self._reason_to_stop(job, token.token_id) or job.reason
            if sequence.num_computed_tokens >= (job.num_cached_blocks + 1) * self.block_size:
                self._full_blocks += self._cache_full_blocks(job)
            if job.reason is not None:
                self._end(job, job.reason)
        return changed

    def _reason_to_stop(self, job: Job, token_id: int) -> FinishReason | None:
        sequence, params = job.sequence, job.sequence.sampling
        is_end = (token_id in self._eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
        if is_end and sequence.num_output_tokens > params.min_tokens:
            return "stop"
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self._max_model_len or num_tokens - job.num_prefix_tokens >= params.max_tokens:
            return "length"
        return None

    def take_full_blocks(self) -> list[BlockToStore]:
        """Blocks computed here that became full since the last call, parents first: to be written back before the next step."""
        blocks, self._full_blocks = self._full_blocks, []
        return blocks

    def _cache_full_blocks(self, job: Job) -> list[BlockToStore]:
        """Let the blocks that became full be found."""
        if job.chain is None:
            return []
        num_full = job.sequence.num_computed_tokens // self.block_size
        if num_full > len(job.chain.hashes):
            job.chain.extend(job.sequence.token_ids)
        full = []
        for index in range(job.num_cached_blocks, num_full):
            block_hash, parent, block = job.chain.hashes[index], job.chain.parent(index), job.sequence.block_table[index]
            self.pool.cache(block, block_hash, parent)
            tokens = job.sequence.token_ids[index * self.block_size : (index + 1) * self.block_size]
            full.append(BlockToStore(block_hash, parent, pack_tokens(tokens), block, job.request.partition))
        job.num_cached_blocks = max(job.num_cached_blocks, num_full)
        return full

    # -- leave ---------------------------------------------------------------------------------------------------------
    def fail(self, job: Job) -> None:
        """End a job whose `error` is set."""
        self._end(job, None)

    def _end(self, job: Job, reason: FinishReason | None) -> None:
        job.reason = reason
        if job in self.running:
            self.running.remove(job)
        self._release(job)
        job.state = State.ENDED

    def _release(self, job: Job) -> None:
        self.pool.free(job.sequence.block_table)
        job.sequence.block_table = []
        job.sequence.num_computed_tokens = 0
        job.num_cached_blocks = 0

    def remove(self, job: Job) -> None:
        """Forget a job in whatever state, blocks and all. Not while a step computes it or a load fills it: the caller waits."""
        if job.state is not State.ENDED:
            self._end(job, None)
        self.jobs.pop(job.sequence.key, None)

    # -- what others want to know ----------------------------------------------------------------------------------------
    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens taken and still to compute."""
        return sum(max(job.sequence.num_uncomputed_tokens - 1, 0) for job in self.jobs.values() if job.state is not State.ENDED)

    def take_preemptions(self) -> int:
        """How often a sequence had to give up its blocks since the last call."""
        number, self._num_preemptions = self._num_preemptions, 0
        return number

    def steps_until_change(self) -> int:
        """Steps for which the batch stays as it is (0: the next one may differ): what a simulator can jump over."""
        if any(job.state is not State.RUNNING for job in self.jobs.values()) or not self.running:
            return 0
        if any(job.sequence.num_uncomputed_tokens != 1 for job in self.running):
            return 0
        spare = [len(job.sequence.block_table) * self.block_size - job.sequence.num_tokens for job in self.running]
        left = [job.request.sampling.max_tokens - job.num_new_tokens - 1 for job in self.running]
        return max(min(*spare, *left), 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return (num_tokens + self.block_size - 1) // self.block_size
