"""A decode worker against everything that may come over the bus: the text is the same, it ends once, and no block stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.decode.job import State
from services.decode.service import DecodeService
from shared.engine.batch import Batch
from shared.engine.engine import Sampled
from shared.errors import NoResponders
from shared.messages.codec import decode, encode
from shared.messages.fleet import DrainReply
from shared.messages.kv import KvSnapshot, KvSnapshotRequest
from shared.messages.request import GenerateRequest
from shared.types import pack_tokens
from tests.conftest import Buses
from tests.support.waiting import until
from tests.support.workers import Workers, counted, is_idle

pytestmark = pytest.mark.timeout(60)

PROMPT = list(range(3000, 3040))
POISON = 666
SLOW = "a=0,d=5"
"""5 ms a decode step."""


@pytest.fixture
async def workers(make_bus: Buses, namespace: str) -> AsyncIterator[Workers]:
    async with Workers(make_bus, namespace, sim_profile=SLOW) as workers:
        yield workers


def poison(worker: DecodeService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with the token POISON fail, as with an input that the device cannot take."""
    forward = worker.engine.forward

    def fail(batch: Batch) -> list[Sampled]:
        if any(POISON in item.sequence.token_ids for item in batch.items):
            raise RuntimeError("device-side assert")
        return forward(batch)

    monkeypatch.setattr(worker.engine, "forward", fail)


async def test_from_task_to_finish(workers: Workers) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 30), queue_ms=12.0)
    output = await gateway.finished(request)
    assert len(output) == 30
    [finish] = gateway.finishes[request.msg_id]
    assert (finish.reason, finish.instance, finish.decode_worker) == ("length", worker.instance, worker.instance)
    usage = finish.usage
    assert (usage.num_prompt_tokens, usage.num_output_tokens, usage.num_computed_tokens, usage.queue_ms) == (40, 30, 40, 12.0)
    assert [asked.request_id for asked in gateway.asked] == [request.request_id], "in the first seconds of its life it asks"
    await until(lambda: is_idle(worker))
    assert counted(worker, "decode_ended", outcome="length") == 1


async def test_the_text_is_the_same_among_others_with_too_few_blocks(workers: Workers) -> None:
    worker = await workers.decode()
    prompts = [[4000 + number, *PROMPT[: 5 + 4 * number]] for number in range(8)]
    alone = [await workers.generate(worker, prompt, 60) for prompt in prompts]
    tight = await workers.decode(
        engine=msgspec.structs.replace(workers.engine, kv_device=24 * worker.engine.spec.layout.block_bytes), max_num_seqs=6
    )
    together = await asyncio.gather(*(workers.generate(tight, prompt, 60) for prompt in prompts))
    assert together == alone
    await until(lambda: is_idle(tight) and counted(tight, "decode_preemptions"))


async def test_a_task_that_comes_twice_is_one_text(workers: Workers) -> None:
    worker = await workers.decode()
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 40))
    await until(lambda: workers.gateway.output[request.msg_id])
    await workers.to_decode(worker, request, msg_id="once more")
    await workers.gateway.finished(request)
    await until(lambda: is_idle(worker))
    assert len(workers.gateway.finishes[request.msg_id]) == 1
    assert counted(worker, "decode_ended") == 1


async def test_an_unwanted_task_is_not_run(workers: Workers) -> None:
    worker = await workers.decode()
    workers.gateway.wants = lambda asked: asked.epoch == 1
    old = await workers.to_decode(worker, workers.request(worker, PROMPT, 5))
    new = await workers.to_decode(worker, msgspec.structs.replace(old, epoch=1))
    await workers.gateway.finished(new)
    await until(lambda: counted(worker, "unwanted_attempts", reason="not_wanted") == 1)
    assert not workers.gateway.finishes[old.msg_id]


@pytest.mark.parametrize("num_lost", [3, 100])
async def test_lost_last_batches_are_made_up_for_by_the_finish(workers: Workers, num_lost: int) -> None:
    """A few stand in the Finish itself; more are resent before it is repeated."""
    worker, gateway = await workers.decode(), workers.gateway
    expected = await workers.generate(worker, PROMPT, 110)
    before = gateway.num_batches
    gateway.loses = lambda batch: 110 - num_lost < gateway.num_batches - before <= 110
    assert await workers.generate(worker, PROMPT, 110) == expected
    await until(lambda: is_idle(worker))


async def test_a_finish_is_repeated_until_it_is_answered(workers: Workers) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    gateway.is_deaf = True
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 5))
    await until(lambda: len(gateway.finishes[request.msg_id]) == 3)
    assert len(worker.jobs()) == 1
    assert worker.scheduler.pool.num_used == 0
    gateway.is_deaf = False
    await gateway.finished(request)
    await until(lambda: is_idle(worker))
    assert counted(worker, "finish_retries", reason="malformed_message") == 3


async def test_a_gateway_that_is_gone_keeps_nothing_here(workers: Workers) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    gateway.is_deaf = True
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 5))
    await until(lambda: gateway.finishes[request.msg_id])
    await gateway.die()
    await until(lambda: is_idle(worker))
    assert counted(worker, "decode_ended", outcome="gateway_gone") == 1


async def test_a_gateway_that_goes_in_the_middle_takes_its_work_with_it(workers: Workers) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 2000))
    await until(lambda: gateway.output[request.msg_id])
    await gateway.die()
    await until(lambda: is_idle(worker))
    assert counted(worker, "decode_ended", outcome="gateway_gone") == 1
    assert len(gateway.output[request.msg_id]) < 2000


async def test_tokens_are_sent_again_when_asked(workers: Workers) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 2000))
    await until(lambda: len(gateway.output[request.msg_id]) >= 20)
    delta = (await gateway.resend(worker.instance, request, 7)).delta
    assert delta is not None
    assert delta.index == 7
    assert delta.token_ids[:13] == gateway.output[request.msg_id][7:20]
    assert (await gateway.resend(worker.instance, msgspec.structs.replace(request, epoch=1), 0)).delta is None
    await gateway.cancel(request)
    await until(lambda: is_idle(worker))
    assert (await gateway.resend(worker.instance, request, 0)).delta is None


async def test_whoever_holds_a_request_says_so(workers: Workers) -> None:
    worker, gateway = await workers.decode(max_num_seqs=1), workers.gateway
    running, waiting = [await workers.to_decode(worker, workers.request(worker, PROMPT, 2000)) for _ in range(2)]
    stages = {(running.request_id, "decode"), (waiting.request_id, "waiting")}
    await until(lambda: stages <= {(held.request_id, held.stage) for _, held in gateway.held})
    assert {(progress.instance, progress.role) for progress, _ in gateway.held} == {(worker.instance, "decode")}
    for request in (running, waiting):
        await gateway.cancel(request)
    await until(lambda: is_idle(worker))


async def test_a_cancel_breaks_off_a_load(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await workers.decode()
    monkeypatch.setattr(worker.presence.kv, "load", lambda *args, **more: asyncio.Event().wait())
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 50))
    await until(lambda: [job.state for job in worker.scheduler.jobs.values()] == [State.LOADING])
    assert worker.scheduler.pool.num_used > 0
    await workers.gateway.cancel(request)
    await until(lambda: is_idle(worker))
    assert counted(worker, "decode_ended", outcome="cancelled") == 1


async def test_a_failing_step_ends_only_the_request_at_fault(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, gateway = await workers.decode(), workers.gateway
    expected = await workers.generate(worker, PROMPT, 40)
    poison(worker, monkeypatch)
    good = [await workers.to_decode(worker, workers.request(worker, PROMPT, 40)) for _ in range(3)]
    await until(lambda: all(gateway.output[request.msg_id] for request in good))
    bad = await workers.to_decode(worker, workers.request(worker, [*PROMPT[:9], POISON], 5))
    await until(lambda: gateway.finishes[bad.msg_id])
    assert gateway.finishes[bad.msg_id][0].error_code == "engine_error"
    assert "device-side" not in gateway.finishes[bad.msg_id][0].error_message
    assert [await gateway.finished(request) for request in good] == [expected] * 3
    await until(lambda: is_idle(worker))
    assert counted(worker, "engine_errors") >= 2, "once together, once alone"
    assert await workers.generate(worker, PROMPT, 40) == expected


async def test_what_is_no_task_is_dropped_and_counted(workers: Workers) -> None:
    worker = await workers.decode()
    for number, payload in enumerate((b"", b"\x80", encode(DrainReply(1)), bytes(300))):
        await workers.gateway.bus.enqueue(workers.subjects.decode(worker.instance), payload, msg_id=f"bad {number}")
    await until(lambda: counted(worker, "malformed_messages", kind="decode") == 4)
    assert len(await workers.generate(worker, PROMPT, 3)) == 3


@pytest.mark.parametrize(
    ("token_ids", "fields", "code"),
    [
        (b"\x01\x00\x00", {}, "invalid_request"),
        (b"", {}, "invalid_request"),
        (pack_tokens([5, 6]), {"num_emitted": 2}, "invalid_request"),
        (pack_tokens([5, 6]), {"num_emitted": 3}, "invalid_request"),
        (pack_tokens([5, 10**6]), {}, "invalid_request"),
        (pack_tokens([5] * 64), {}, "context_length_exceeded"),
        (pack_tokens([5] * 65), {"num_emitted": 9}, "invalid_request"),
    ],
)
async def test_a_task_that_cannot_be_worked_on_ends_with_an_error(
    workers: Workers, token_ids: bytes, fields: dict[str, Any], code: str
) -> None:
    worker, gateway = await workers.decode(engine=msgspec.structs.replace(workers.engine, max_model_len=64)), workers.gateway
    request = await workers.to_decode(worker, workers.request(worker, [1], token_ids=token_ids, **fields))
    await until(lambda: gateway.finishes[request.msg_id])
    assert gateway.finishes[request.msg_id][0].error_code == code
    assert counted(worker, "malformed_messages", kind="decode") == 1
    assert is_idle(worker)


async def test_another_models_task_reuses_nothing(workers: Workers) -> None:
    worker = await workers.decode()
    expected = await workers.generate(worker, PROMPT, 20)
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 20, model="f" * 16))
    assert await workers.gateway.finished(request) == expected
    usage = workers.gateway.finishes[request.msg_id][0].usage
    assert (usage.num_cached_tokens, usage.num_computed_tokens) == (0, 40)
    assert counted(worker, "other_model_tasks") == 1


async def test_the_second_time_the_prompt_is_cached(workers: Workers) -> None:
    worker = await workers.decode()
    await workers.generate(worker, PROMPT, 20)
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 20))
    await workers.gateway.finished(request)
    usage = workers.gateway.finishes[request.msg_id][0].usage
    assert (usage.num_cached_tokens, usage.num_computed_tokens) == (32, 8)
    other = await workers.to_decode(worker, workers.request(worker, PROMPT, 20, salt=b"t" * 32))
    await workers.gateway.finished(other)
    assert workers.gateway.finishes[other.msg_id][0].usage.num_cached_tokens == 0, "another tenant's blocks"


async def test_the_pools_blocks_are_told_in_pages(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await workers.decode()
    await workers.generate(worker, PROMPT, 30)
    monkeypatch.setattr("shared.worker.device_events.PAGE_BLOCKS", 2)
    keys, cursor = set(), 0
    while cursor is not None:
        subject = workers.subjects.worker(worker.instance, "snapshot")
        reply = await workers.gateway.bus.request(subject, encode(KvSnapshotRequest(cursor)), timeout_s=5.0)
        page = decode(KvSnapshot, reply.payload)
        keys |= {event.block_keys[at : at + 16] for event in page.entries for at in range(0, len(event.block_keys), 16)}
        cursor = page.next_cursor
    assert keys == {block_hash[:16] for block_hash, _ in worker.scheduler.pool.entries()}
    assert len(keys) == 69 // 16


async def test_an_attempt_that_had_ended_ends_again(workers: Workers) -> None:
    """The stop token was emitted, and its worker died before the Finish."""
    worker = await workers.decode()
    first = await workers.generate(worker, PROMPT, 12)
    stop = {"sampling": {"stop_token_ids": [first[4]]}}
    request = workers.request(worker, PROMPT + first[:5], 7, num_emitted=5, epoch=1, **stop)
    workers.gateway.output[request.msg_id] = first[:5]
    await workers.to_decode(worker, request)
    assert await workers.gateway.finished(request) == first[:5]
    assert workers.gateway.finishes[request.msg_id][0].reason == "stop"


async def test_a_resubmission_goes_on_with_the_text(workers: Workers) -> None:
    worker, other = await workers.decode(), await workers.decode()
    whole = await workers.generate(worker, PROMPT, 30)
    request = workers.request(other, PROMPT + whole[:11], 19, num_emitted=11, epoch=2)
    workers.gateway.output[request.msg_id] = whole[:11]
    await workers.to_decode(other, request)
    assert await workers.gateway.finished(request) == whole


async def test_a_lost_lease_drops_everything_and_comes_back_as_another(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, gateway = await workers.decode(max_num_seqs=2), workers.gateway
    expected = await workers.generate(worker, PROMPT, 10)
    old = worker.instance
    requests = [await workers.to_decode(worker, workers.request(worker, PROMPT, 2000)) for _ in range(3)]
    await until(lambda: all(gateway.output[request.msg_id] for request in requests[:2]))
    monkeypatch.setattr(worker.presence.kv, "load", lambda *args, **more: asyncio.Event().wait())
    await workers.to_decode(worker, workers.request(worker, PROMPT[::-1], 5))
    await until(lambda: any(job.state is State.LOADING for job in worker.scheduler.jobs.values()))
    await worker.lease_lost()
    assert worker.instance != old
    assert is_idle(worker)
    assert not any(gateway.finishes[request.msg_id] for request in requests)
    with pytest.raises(NoResponders):
        await gateway.resend(old, requests[0], 0)
    assert await workers.generate(worker, PROMPT, 10) == expected
    assert counted(worker, "worker_reborn") == 1


async def test_the_drain_verb_finishes_and_asks_the_process_to_end(workers: Workers) -> None:
    worker = await workers.decode()
    request = await workers.to_decode(worker, workers.request(worker, PROMPT, 60))
    await until(lambda: workers.gateway.output[request.msg_id])
    reply = await workers.gateway.bus.request(workers.subjects.worker(worker.instance, "drain"), b"", timeout_s=5.0)
    assert decode(DrainReply, reply.payload).num_held == 1
    assert worker.leaving.is_set()
    await worker.drain()
    assert len(await workers.gateway.finished(request)) == 60


async def test_what_a_drain_cannot_finish_is_given_back(make_bus: Buses, namespace: str) -> None:
    """No Finish: the gateways submit it again when they see the lease end."""
    requests: list[GenerateRequest] = []
    async with Workers(make_bus, namespace, sim_profile=SLOW, drain_s=0.05) as workers:
        worker = await workers.decode()
        requests = [await workers.to_decode(worker, workers.request(worker, PROMPT, 2000)) for _ in range(3)]
        await until(lambda: all(workers.gateway.output[request.msg_id] for request in requests))
    assert is_idle(worker)
    assert not any(workers.gateway.finishes[request.msg_id] for request in requests)
    assert counted(worker, "engine_errors") == 0
