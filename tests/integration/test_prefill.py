"""Prefill, store and decode together: blocks move, nothing is computed twice, and whatever fails there the text is the same."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.decode.service import DecodeService
from services.kvstore.service import KvStoreService
from services.prefill.service import PrefillService
from shared.engine.batch import Batch
from shared.engine.engine import Sampled
from shared.kv import slot
from shared.messages.codec import decode
from shared.messages.fleet import DrainReply
from shared.messages.request import GenerateRequest
from shared.messages.session import Finish
from shared.types import pack_tokens, unpack_tokens
from tests.conftest import Buses
from tests.support.waiting import until
from tests.support.workers import Workers, counted, is_idle

pytestmark = pytest.mark.timeout(60)

PROMPT = list(range(3000, 3100))
NUM_BLOCKS = 99 // 16
SLOW = "a=0,b=1"
"""1 ms a prompt token."""


@pytest.fixture
def kv_dir() -> Iterator[Path]:
    """A folder on tmpfs, as an arena needs one."""
    made = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    yield made / "kv"
    shutil.rmtree(made)


@pytest.fixture
async def workers(make_bus: Buses, namespace: str, kv_dir: Path) -> AsyncIterator[Workers]:
    async with Workers(make_bus, namespace, kv_dir, sim_profile=SLOW) as workers:
        yield workers


async def pair(workers: Workers, **settings: Any) -> tuple[PrefillService, DecodeService]:
    return await workers.prefill(**settings), await workers.decode()


async def through(workers: Workers, prefill: PrefillService, worker: DecodeService, prompt: list[int], **fields: Any) -> Finish:
    """The Finish of a new request that goes through prefill; its text is the one that decode gives alone."""
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, prompt, 8, **fields))
    output = await workers.gateway.finished(request)
    assert output == await alone(workers, prompt)
    await until(lambda: is_idle(prefill) and is_idle(worker))
    return workers.gateway.finishes[request.msg_id][0]


async def alone(workers: Workers, prompt: list[int]) -> list[int]:
    """What a worker without prefill, store and cache gives."""
    kv_dir, workers.kv_dir = workers.kv_dir, None
    worker = await workers.decode()
    workers.kv_dir = kv_dir
    return await workers.generate(worker, prompt, 8, salt=b"a" * 32)


async def test_decode_loads_what_prefill_committed(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    finish = await through(workers, prefill, worker, PROMPT)
    assert (finish.prefill_worker, finish.decode_worker) == (prefill.instance, worker.instance)
    usage = finish.usage
    assert (usage.num_loaded_blocks, usage.num_loaded_bytes) == (NUM_BLOCKS, NUM_BLOCKS * prefill.engine.spec.layout.block_bytes)
    assert (usage.num_cached_tokens, usage.num_computed_tokens) == (0, 100)
    assert counted(prefill, "prefill_computed_tokens") == NUM_BLOCKS * 16
    assert counted(worker, "decode_handoff_misses") == 0
    assert counted(prefill, "prefill_tasks", outcome="handed_over") == 1


def hold_commits(prefill: PrefillService, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The worker's next commit leaves when this is set."""
    link, may_leave = prefill.presence.kv._link, asyncio.Event()
    ask = link.ask

    async def held(verb: Any, *args: Any, **more: Any) -> Any:
        if verb == "commit":
            await may_leave.wait()
        return await ask(verb, *args, **more)

    monkeypatch.setattr(link, "ask", held)
    return may_leave


async def test_decode_has_its_task_before_the_commit_and_waits_for_it(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    await through(workers, prefill, worker, list(range(2000, 2100)))
    may_leave = hold_commits(prefill, monkeypatch)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, PROMPT, 8))
    await until(lambda: counted(prefill, "prefill_tasks", outcome="handed_over") == 2 and is_idle(prefill))
    may_leave.set()
    assert await workers.gateway.finished(request) == await alone(workers, PROMPT)
    assert workers.gateway.finishes[request.msg_id][0].usage.num_loaded_blocks == NUM_BLOCKS
    assert counted(worker, "decode_handoff_misses") == 0


async def test_a_commit_that_never_comes_is_a_counted_miss(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    hold_commits(prefill, monkeypatch)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, PROMPT, 8))
    assert await workers.gateway.finished(request) == await alone(workers, PROMPT)
    assert workers.gateway.finishes[request.msg_id][0].usage.num_computed_tokens == 100 + NUM_BLOCKS * 16
    assert counted(worker, "decode_handoff_misses", reason="under_way") == NUM_BLOCKS


async def test_another_hosts_decode_has_its_task_behind_the_commit(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    may_leave = hold_commits(prefill, monkeypatch)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, PROMPT, 8), decode_host="f" * 8)
    await until(lambda: bool(prefill._handing_over))
    assert counted(prefill, "prefill_tasks") == 0
    may_leave.set()
    assert await workers.gateway.finished(request) == await alone(workers, PROMPT)


async def test_the_second_turn_computes_only_what_is_new(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    await through(workers, prefill, worker, PROMPT)
    before = counted(prefill, "prefill_computed_tokens")
    usage = (await through(workers, prefill, worker, PROMPT + list(range(4000, 4040)))).usage
    assert counted(prefill, "prefill_computed_tokens") - before == 139 // 16 * 16 - NUM_BLOCKS * 16
    assert usage.num_cached_tokens == NUM_BLOCKS * 16
    assert usage.num_cached_tokens + usage.num_computed_tokens == 140


async def test_prompts_that_come_together_compute_what_they_share_once(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    requests = [workers.request(prefill, [*PROMPT, *range(200 + number, 220 + number)], 8) for number in range(3)]
    await asyncio.gather(*(workers.to_prefill(prefill, worker, request) for request in requests))
    for request in requests:
        assert await workers.gateway.finished(request) == await alone(workers, unpack_tokens(request.token_ids))
    computed = counted(prefill, "prefill_computed_tokens")
    assert computed == 96 + 3 * 16
    assert computed + counted(prefill, "prefill_cached_tokens") == 3 * 112


async def test_another_prefill_worker_loads_the_prefix_from_the_store(workers: Workers) -> None:
    await workers.store()
    first, worker = await pair(workers)
    await through(workers, first, worker, PROMPT)
    second, fresh = await pair(workers)
    finish = await through(workers, second, fresh, PROMPT)
    assert counted(second, "prefill_computed_tokens") == 0
    assert counted(second, "prefill_cached_tokens") == NUM_BLOCKS * 16
    assert finish.usage.num_loaded_blocks == NUM_BLOCKS


async def test_what_decode_generates_is_found_by_others(workers: Workers) -> None:
    await workers.store()
    worker = await workers.decode()
    output = await workers.generate(worker, PROMPT, 60)
    await until(lambda: is_idle(worker) and counted(worker, "kvclient_stored_blocks") == 159 // 16)
    other = await workers.decode()
    turn = PROMPT + output + [5000, 5001]
    request = await workers.to_decode(other, workers.request(other, turn, 4))
    await workers.gateway.finished(request)
    assert workers.gateway.finishes[request.msg_id][0].usage.num_loaded_blocks == 159 // 16
    assert (await alone(workers, turn))[:4] == workers.gateway.output[request.msg_id]


async def test_without_a_store_prefill_computes_nothing_in_vain(workers: Workers) -> None:
    prefill, worker = await pair(workers)
    await through(
        workers,
        prefill,
        worker,
        PROMPT,
    )
    assert counted(prefill, "prefill_computed_tokens") == 0
    assert counted(prefill, "prefill_tasks", outcome="handed_over") == 1


async def test_a_store_that_died_costs_only_time(workers: Workers) -> None:
    store = await workers.store()
    prefill, worker = await pair(workers)
    await through(workers, prefill, worker, PROMPT)
    await store.stop()
    await through(workers, prefill, worker, list(range(5000, 5100)))
    assert counted(prefill, "prefill_store_faults", reason="store_absent") >= 1
    assert counted(worker, "kvclient_faults", reason="store_absent") >= 1


async def test_corrupt_blocks_are_computed_again(workers: Workers) -> None:
    store: KvStoreService = await workers.store()
    prefill, worker = await pair(workers)
    await through(workers, prefill, worker, PROMPT)
    spec, dram = prefill.engine.spec, store.store.dram
    for block_hash, _ in prefill.scheduler.pool.entries():
        block = dram.get(block_hash, spec.model_digest)
        assert block is not None
        slot.payload(dram.memory, block.offset, spec.layout.block_bytes)[0] ^= 1
    fresh = await workers.decode()
    request = await workers.to_decode(fresh, workers.request(fresh, PROMPT, 8))
    assert await workers.gateway.finished(request) == await alone(workers, PROMPT)
    assert workers.gateway.finishes[request.msg_id][0].usage.num_loaded_blocks == 0
    assert counted(fresh, "kvclient_corrupt_blocks") == 1


async def test_a_failing_chunk_leaves_the_rest_to_decode(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    await workers.store()
    prefill, worker = await pair(workers, chunk_tokens=32)
    forward, num_chunks = prefill.engine.forward, 0

    def fail_the_second(batch: Batch) -> list[Sampled]:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 2:
            raise RuntimeError("device-side assert")
        return forward(batch)

    monkeypatch.setattr(prefill.engine, "forward", fail_the_second)
    usage = (await through(workers, prefill, worker, PROMPT)).usage
    assert usage.num_loaded_blocks == 2
    assert counted(prefill, "engine_errors") == 1


async def test_a_cancel_between_chunks_hands_nothing_on(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers, chunk_tokens=16, chunk_ms=20.0)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, list(range(1000, 3000)), 8))
    await until(lambda: counted(prefill, "prefill_computed_tokens"))
    await workers.gateway.cancel(request)
    await until(lambda: is_idle(prefill))
    assert counted(prefill, "prefill_tasks", outcome="cancelled") == 1
    assert counted(prefill, "prefill_computed_tokens") < 1000
    await through(workers, prefill, worker, PROMPT)
    assert not workers.gateway.finishes[request.msg_id]


@pytest.mark.parametrize("operation", ["load", "store"])
async def test_a_cancel_breaks_off_what_the_store_does_not_answer(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    hanging = asyncio.Event()

    async def hang(*args: Any, **more: Any) -> None:
        hanging.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(prefill.presence.kv, operation, hang)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, PROMPT, 8))
    await hanging.wait()
    await workers.gateway.cancel(request)
    await until(lambda: is_idle(prefill))


async def test_another_models_task_goes_on_uncomputed(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers)
    finish = await through(workers, prefill, worker, PROMPT, model="f" * 16)
    assert finish.prefill_worker == prefill.instance
    assert finish.usage.num_loaded_blocks == 0
    assert counted(prefill, "prefill_computed_tokens") == 0


async def test_a_prompt_larger_than_the_pool_goes_on_uncomputed(workers: Workers) -> None:
    await workers.store()
    worker = await workers.decode()
    small = msgspec.structs.replace(workers.engine, kv_device=4 * worker.engine.spec.layout.block_bytes)
    prefill = await workers.prefill(engine=small)
    await through(workers, prefill, worker, PROMPT)
    assert counted(prefill, "prefill_computed_tokens") == 0


async def test_what_is_no_task_ends_here(workers: Workers) -> None:
    prefill, worker = await pair(workers)
    await workers.gateway.bus.enqueue(workers.subjects.prefill(prefill.instance), b"\x80", msg_id="bad")
    await until(lambda: counted(prefill, "malformed_messages", kind="prefill") == 1)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, [1], token_ids=pack_tokens([10**6])))
    await until(lambda: workers.gateway.finishes[request.msg_id])
    assert workers.gateway.finishes[request.msg_id][0].error_code == "invalid_request"
    assert is_idle(prefill)


async def test_a_lost_lease_drops_everything_and_comes_back_as_another(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers, chunk_tokens=16, chunk_ms=20.0)
    old = prefill.instance
    requests: list[GenerateRequest] = [
        await workers.to_prefill(prefill, worker, workers.request(prefill, list(range(first, first + 2000)), 8)) for first in (1000, 4000)
    ]
    await until(lambda: counted(prefill, "prefill_computed_tokens"))
    await prefill.lease_lost()
    assert prefill.instance != old
    assert is_idle(prefill)
    await through(workers, prefill, worker, PROMPT)
    assert not any(workers.gateway.finishes[request.msg_id] for request in requests)


async def test_the_drain_verb_hands_over_what_is_here(workers: Workers) -> None:
    await workers.store()
    prefill, worker = await pair(workers, chunk_tokens=16)
    request = await workers.to_prefill(prefill, worker, workers.request(prefill, PROMPT, 8))
    await until(lambda: counted(prefill, "prefill_computed_tokens"))
    reply = await workers.gateway.bus.request(workers.subjects.worker(prefill.instance, "drain"), b"", timeout_s=5.0)
    assert decode(DrainReply, reply.payload).num_held == 1
    await prefill.drain()
    assert is_idle(prefill)
    assert await workers.gateway.finished(request) == await alone(workers, PROMPT)
