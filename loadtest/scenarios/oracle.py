"""What no router can exceed: the caches of all workers as one, and nobody waits while a worker is idle."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from loadtest.scenarios.fleet import WARM_UP_RATE, Cache, Shape
from loadtest.scenarios.workload import BLOCK_SIZE, Prompt
from shared.kv.hashing import split
from shared.types import KEY_BYTES


def oracle_reuse(prompts: Sequence[Prompt], shape: Shape) -> float:
    """Share of the tokens that one cache with the capacity of all workers together has, before which every prompt comes in order."""
    cache = Cache(shape.num_blocks * shape.num_workers)
    uncached = sum(take(cache, prompt) for prompt in prompts)
    return 1 - uncached / sum(prompt.num_tokens for prompt in prompts)


def oracle_ttft_s(prompts: Sequence[Prompt], rate: float, shape: Shape, seed: int, warm_up: Sequence[Prompt] = ()) -> list[float]:
    """In order of arrival, from one queue, by whichever worker is idle first; all have one cache without limit, and in it a prefix as soon
    as one of them begins to compute it. Prompts arrive as in a `Simulation` of the same seed; sessions are not known here."""
    generator, now_s = random.Random(seed), 0.0
    cache, idle_s = Cache(2**63), [0.0] * shape.num_workers
    ttft_s = []
    for number, prompt in enumerate([*warm_up, *prompts]):
        is_counted = number >= len(warm_up)
        now_s += generator.expovariate(rate if is_counted else WARM_UP_RATE)
        uncached = take(cache, prompt)
        if is_counted:
            end_s = max(now_s, idle_s[0]) + uncached / shape.prefill_tokens_per_s + shape.step_s
            heapq.heapreplace(idle_s, end_s)
            ttft_s.append(end_s - now_s)
    return ttft_s


def take(cache: Cache, prompt: Prompt) -> int:
    """Tokens of a prompt that must be computed; then it is cached."""
    keys = split(prompt.block_keys, KEY_BYTES)
    uncached = max(prompt.num_tokens - cache.overlap(keys) * BLOCK_SIZE, 1)
    cache.store(keys)
    return uncached
