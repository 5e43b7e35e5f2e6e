"""The races between a request's parts, each played by hand: real gateway, router and decode services over either bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.decode.service import DecodeService
from shared.messages.codec import decode_union, encode
from shared.messages.request import Cancel, DecodeTask, GenerateRequest
from shared.messages.session import TokenBatch, TokenMessage
from shared.telemetry import NullTelemetry
from shared.telemetry.telemetry import Telemetry
from tests.conftest import Buses
from tests.support.cluster import Cluster, finished

pytestmark = pytest.mark.timeout(60)

PROMPT = list(range(3000, 3040))


@pytest.fixture
async def cluster(make_bus: Buses, namespace: str, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with Cluster(make_bus, namespace, tmp_path, "a=0,d=5") as cluster:
        yield cluster


def counted(telemetry: Telemetry, name: str, **labels: str) -> float:
    assert isinstance(telemetry, NullTelemetry)
    return telemetry.total(name, **labels)


async def until(condition: Any) -> None:
    """Poll for what no message tells; the test's time limit bounds it."""
    while not condition():
        await asyncio.sleep(0.01)


def task_for(request: GenerateRequest, worker: DecodeService) -> tuple[str, bytes, str]:
    task = DecodeTask(request, "0" * 8, worker.instance)
    return worker.subjects.decode(worker.instance), encode(task), f"{request.msg_id}:{worker.instance}"


async def send_task(request: GenerateRequest, worker: DecodeService) -> None:
    subject, payload, msg_id = task_for(request, worker)
    await worker.bus.enqueue(subject, payload, msg_id=msg_id)


def is_idle(worker: DecodeService) -> bool:
    worker.scheduler.pool.check_integrity()
    return not worker.scheduler.jobs and worker.scheduler.pool.num_used == 0


async def test_lost_token_batches_are_asked_for_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await cluster.decode()
    await cluster.router()
    await cluster.served()
    expected = await cluster.generate(PROMPT, 100)
    publish, num_seen = worker.bus.publish, 0

    async def lose_some(subject: str, payload: bytes, **more: Any) -> None:
        nonlocal num_seen
        if subject.startswith(worker.subjects.tokens("*")[:-1]) and isinstance(decode_union(TokenMessage, payload), TokenBatch):
            num_seen += 1
            if num_seen % 3 == 0 or 95 <= num_seen <= 101:
                return
        await publish(subject, payload, **more)

    monkeypatch.setattr(worker.bus, "publish", lose_some)
    assert await cluster.generate(PROMPT, 100) == expected
    assert counted(cluster.gateway.telemetry, "session_events", event="gap") > 0
    assert counted(cluster.gateway.telemetry, "session_events", event="resubmitted") == 0


async def test_a_cancel_before_the_task_is_remembered(cluster: Cluster) -> None:
    worker = await cluster.decode()
    await cluster.router()
    await cluster.served()
    request = await cluster.request(PROMPT, 50)
    await cluster.gateway.bus.publish(worker.subjects.cancel(), encode(Cancel(request.request_id, 0)))
    await until(lambda: worker.attempts.is_cancelled(request.request_id, 0, worker.instance))
    await send_task(request, worker)
    await until(lambda: counted(worker.telemetry, "unwanted_attempts", reason="not_wanted") == 1)
    assert is_idle(worker)
    assert counted(worker.telemetry, "decode_ended", outcome="length") == 0


async def test_a_task_of_a_dead_epoch_is_not_run(cluster: Cluster) -> None:
    worker = await cluster.decode()
    await cluster.router()
    await cluster.served()
    request = await cluster.request(PROMPT, 5)
    stream = await cluster.gateway.sessions.open(request)
    await finished(cluster.gateway, stream)
    await until(lambda: counted(worker.telemetry, "decode_ended", outcome="length") == 1)
    await worker.bus.enqueue(*task_for(request, worker)[:2], msg_id="again")
    await until(lambda: counted(worker.telemetry, "unwanted_attempts", reason="not_wanted") == 1)
    assert is_idle(worker)
    assert counted(worker.telemetry, "decode_ended", outcome="length") == 1


async def test_two_workers_of_one_epoch_give_one_text(cluster: Cluster) -> None:
    """As when a router dies between publishing the task and acking the request."""
    first, second = await cluster.decode(), await cluster.decode()
    await cluster.router()
    await cluster.served()
    expected = await cluster.generate(PROMPT, 60)
    request = await cluster.request(PROMPT, 60)
    stream = await cluster.gateway.sessions.open(request)
    await send_task(request, first)
    await send_task(request, second)
    assert await finished(cluster.gateway, stream) == expected
    workers = (first, second)
    await until(lambda: sum(counted(worker.telemetry, "decode_ended", outcome="length") for worker in workers) == 2)
    await until(lambda: sum(counted(worker.telemetry, "decode_ended", outcome="cancelled") for worker in workers) >= 1)
    await until(lambda: is_idle(first) and is_idle(second))


async def test_a_cancel_frees_every_block(cluster: Cluster) -> None:
    worker = await cluster.decode()
    await cluster.router()
    await cluster.served()
    stream = await cluster.gateway.sessions.open(await cluster.request(PROMPT, 2000))
    await stream.next()
    cluster.gateway.sessions.close(stream)
    await until(lambda: is_idle(worker))
    assert counted(worker.telemetry, "decode_ended", outcome="cancelled") == 1


async def test_waiting_in_the_queue_is_not_being_lost(cluster: Cluster) -> None:
    """200 requests, most of which wait longer than the 2 s after which silence means lost."""
    await cluster.decode(max_num_seqs=2)
    await cluster.router()
    await cluster.served()
    prompts = [[4000 + number, *PROMPT[:7]] for number in range(200)]
    outputs = await asyncio.gather(*(cluster.generate(prompt, 6) for prompt in prompts))
    assert [len(output) for output in outputs] == [6] * 200
    assert counted(cluster.gateway.telemetry, "session_events", event="resubmitted") == 0


async def test_wiped_streams_cost_no_request(cluster: Cluster, make_bus: Buses) -> None:
    await cluster.decode(max_num_seqs=2)
    await cluster.router()
    await cluster.served()
    expected = await cluster.generate(PROMPT, 40)
    running = [asyncio.ensure_future(cluster.generate(PROMPT, 40)) for _ in range(12)]
    await asyncio.sleep(0.15)
    await make_bus.wipe()
    assert await asyncio.gather(*running) == [expected] * 12


async def test_without_workers_a_request_is_refused_at_once(cluster: Cluster) -> None:
    worker = await cluster.decode()
    await cluster.router()
    await cluster.served()
    request = await cluster.request(PROMPT, 5)
    other = GenerateRequest(**{field: getattr(request, field) for field in request.__struct_fields__} | {"model": "f" * 16})
    stream = await cluster.gateway.sessions.open(other)
    with pytest.raises(Exception, match="no worker serves this model") as refused:
        await finished(cluster.gateway, stream)
    assert getattr(refused.value, "status", None) == 503
    assert is_idle(worker)
