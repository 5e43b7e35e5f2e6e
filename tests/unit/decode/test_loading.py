"""What a decode worker asks its store for, and what it counts as missed."""

from __future__ import annotations

from typing import Any

import pytest

from services.decode.job import Job
from services.decode.loading import HANDED_OVER_WAIT_MS, MAX_WAIT_MS, UNKNOWN_MS_PER_TOKEN, load_prefix
from shared.kvclient import LoadResult
from shared.messages.request import DecodeTask
from shared.telemetry import NullTelemetry
from shared.types import pack_tokens
from shared.worker.chain import Chain
from tests.support.fake_delivery import FakeDelivery, make_request

SIZE = 4
PROMPT = list(range(100, 119))


class Store:
    """Has the first `num_blocks` of what it is asked for."""

    def __init__(self, num_blocks: int = 0, reason: str = "cold") -> None:
        self.result = LoadResult(num_blocks, 64 * num_blocks, [], reason)
        self.asked: list[tuple[Any, ...]] = []

    async def load(self, hashes: list[bytes], tokens: bytes, blocks: list[int], **more: Any) -> LoadResult:
        self.asked.append((hashes, tokens, blocks, more))
        return self.result


def make(prompt: list[int] = PROMPT, has_chain: bool = True, num_device_blocks: int = 0, **task: Any) -> Job:
    request = make_request(1, prompt)
    chain = Chain(bytes(32), request, SIZE, ()) if has_chain else None
    job = Job(DecodeTask(request, "0" * 8, "1" * 8, **task), FakeDelivery(), chain, 0.0)
    job.sequence.block_table = list(range(20, 26))
    job.sequence.num_computed_tokens = num_device_blocks * SIZE
    return job


async def load(job: Job, store: Store, ms_per_token: float = 0.5) -> tuple[LoadResult, NullTelemetry]:
    telemetry = NullTelemetry()
    return await load_prefix(job, store, SIZE, ms_per_token, telemetry), telemetry  # type: ignore[arg-type]


async def test_it_asks_for_what_the_pool_has_not() -> None:
    store = Store(3, "")
    job = make(num_device_blocks=1)
    result, _ = await load(job, store)
    [(hashes, tokens, blocks, more)] = store.asked
    assert job.chain is not None
    assert (hashes, blocks) == (job.chain.hashes[1:4], [21, 22, 23])
    assert tokens == pack_tokens(PROMPT[4:16])
    assert (more["wait_ms"], more["block_ms"]) == (3 * SIZE * 0.5, SIZE * 0.5)
    assert result.num_blocks == 3


async def test_the_last_token_is_always_computed() -> None:
    store = Store()
    await load(make(PROMPT[:16]), store)
    assert len(store.asked[0][0]) == 3


@pytest.mark.parametrize(
    "job",
    [make(PROMPT[:4]), make(has_chain=False), make(may_be_held=False), make(num_device_blocks=4)],
    ids=["short", "other model", "not held", "on the device"],
)
async def test_it_does_not_ask_in_vain(job: Job) -> None:
    store = Store()
    result, telemetry = await load(job, store)
    assert store.asked == []
    assert result.num_blocks == 0
    assert telemetry.total("decode_handoff_misses") == 0


async def test_waiting_is_bounded() -> None:
    store = Store()
    await load(make(), store, ms_per_token=1e6)
    assert store.asked[0][3]["wait_ms"] == MAX_WAIT_MS


async def test_without_a_rate_of_its_own_it_waits_by_prefills() -> None:
    store = Store()
    handed_over = {"prefill_worker": "2" * 8, "num_prefilled_tokens": 16, "num_cached_tokens": 8, "prefill_ms": 48.0}
    await load(make(**handed_over), store, ms_per_token=0.0)
    await load(make(), store, ms_per_token=0.0)
    assert [asked[3]["wait_ms"] for asked in store.asked] == [16 * 6.0, 16 * UNKNOWN_MS_PER_TOKEN]
    assert [asked[3]["block_ms"] for asked in store.asked] == [0, 0], "unknown: nothing is held back"


async def test_what_was_handed_over_is_waited_for_also_by_an_engine_faster_than_messages() -> None:
    store = Store()
    await load(make(prefill_worker="2" * 8, num_prefilled_tokens=16, prefill_ms=1.0), store, ms_per_token=0.001)
    assert store.asked[0][3]["wait_ms"] == HANDED_OVER_WAIT_MS


async def test_what_was_handed_over_and_did_not_come_is_counted_by_reason() -> None:
    _, telemetry = await load(make(prefill_worker="2" * 8, num_prefilled_tokens=16), Store(1, "evicted"))
    assert telemetry.total("decode_handoff_misses", reason="evicted") == 3
    _, telemetry = await load(make(has_chain=False, prefill_worker="2" * 8, num_prefilled_tokens=16), Store())
    assert telemetry.total("decode_handoff_misses", reason="other_model") == 4
