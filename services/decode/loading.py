"""The blocks that a job can get instead of computing them."""

from __future__ import annotations

from services.decode.job import Job
from shared.kvclient import KvClient, LoadResult
from shared.telemetry import Telemetry
from shared.types import pack_tokens

MAX_WAIT_MS = 5_000.0
HANDED_OVER_WAIT_MS = 50.0
"""At least so long, for what prefill handed over: its commit may still be on the way, and an engine may be faster than a message."""
UNKNOWN_MS_PER_TOKEN = 5.0
"""Of a small CPU. Too much costs a wait for blocks that are on their way anyway, too little computes what was about to arrive."""


def may_load(job: Job) -> bool:
    """False: nobody holds any of it, and nobody was to hand it over."""
    return job.task.may_be_held or job.task.num_prefilled_tokens > 0


async def load_prefix(
    job: Job, kv: KvClient, block_size: int, ms_per_token: float, telemetry: Telemetry, traceparent: str = ""
) -> LoadResult:
    """Fill the job's blocks from the store as far as it goes, at most to the token before the last. Blocks that are under way are waited
    for no longer than computing them takes, or a moment if handed over. What was and did not come is counted by reason."""
    sequence = job.sequence
    first = sequence.num_computed_tokens // block_size
    hashes = job.chain.hashes[first : (sequence.num_tokens - 1) // block_size] if job.chain else []
    result = LoadResult(0, 0, [], "other_model" if job.chain is None else "")
    if hashes and job.task.may_be_held:
        tokens = pack_tokens(sequence.token_ids[first * block_size : (first + len(hashes)) * block_size])
        blocks = sequence.block_table[first : first + len(hashes)]
        wait_ms = len(hashes) * block_size * (ms_per_token or prefill_ms_per_token(job) or UNKNOWN_MS_PER_TOKEN)
        if job.task.num_prefilled_tokens:
            wait_ms = max(wait_ms, HANDED_OVER_WAIT_MS)
        result = await kv.load(
            hashes, tokens, blocks, wait_ms=min(wait_ms, MAX_WAIT_MS), traceparent=traceparent, block_ms=ms_per_token * block_size
        )
    handed_over = min(job.task.num_prefilled_tokens, sequence.num_tokens - 1) // block_size - first
    if result.num_blocks < handed_over:
        telemetry.count("decode_handoff_misses", handed_over - result.num_blocks, reason=result.reason or "unknown")
    return result


def prefill_ms_per_token(job: Job) -> float:
    """What a token took at the prefill worker; 0 if it computed none. A decode worker that is always handed its prompts has no rate of
    its own."""
    num_computed = job.task.num_prefilled_tokens - job.task.num_cached_tokens
    return job.task.prefill_ms / num_computed if num_computed > 0 else 0.0
