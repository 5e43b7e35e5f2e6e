"""A router between a played gateway and played workers, over memory and over NATS: waiting, refusing, holding, cancelling, dying."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from services.router.config import RouterConfig
from services.router.service import RouterService
from shared.bus.base import Bus, Message
from shared.config import ServiceConfig
from shared.errors import QueueFull
from shared.messages.codec import decode, encode
from shared.messages.fleet import ModelCard
from shared.messages.kv import BlocksStored, KvEventBatch, KvPrefetch, KvSnapshot
from shared.messages.request import GenerateRequest
from shared.messages.session import Finish
from shared.messages.subjects import Subjects
from shared.service import mint_instance, run_service
from shared.telemetry import NullTelemetry
from shared.types import RequestClass, pack_tokens
from tests.conftest import Buses
from tests.support.fake_delivery import make_request
from tests.support.played_gateway import PlayedGateway
from tests.support.played_worker import PlayedWorker
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)

MODEL = "0" * 16
KEYS = [bytes([number]) * 16 for number in range(1, 65)]


class Rig:
    def __init__(self, make_bus: Buses, subjects: Subjects) -> None:
        self.make_bus, self.subjects = make_bus, subjects
        self.stack = contextlib.AsyncExitStack()
        self.numbers = itertools.count(1)

    async def open(self) -> None:
        self.bus: Bus = await self.make_bus()
        self.gateway = PlayedGateway(self.bus, self.subjects)
        await self.gateway.open()
        self.stack.push_async_callback(self.gateway.close)

    async def router(self, **settings: Any) -> RouterService:
        config = RouterConfig(service=ServiceConfig(namespace=self.subjects.namespace, drain_s=2.0), **settings)
        router = RouterService(config, await self.make_bus(), NullTelemetry(), mint_instance())
        await self.stack.enter_async_context(run_service(router))
        return router

    async def worker(self, **fields: Any) -> PlayedWorker:
        worker = PlayedWorker(await self.make_bus(), self.subjects, MODEL, **fields)
        await worker.open()
        self.stack.push_async_callback(worker.close)
        return worker

    async def submit(self, num_tokens: int = 20, name: RequestClass = "normal", **fields: Any) -> GenerateRequest:
        request = make_request(
            next(self.numbers),
            list(range(num_tokens)),
            **{"gateway": self.gateway.instance, "block_keys": b"".join(KEYS[: num_tokens // 16]), "request_class": name} | fields,
        )
        await self.bus.enqueue(self.subjects.request(name, MODEL), encode(request), msg_id=request.msg_id)
        return request

    async def refused(self, request: GenerateRequest) -> Finish:
        await until(lambda: self.gateway.finishes[request.msg_id])
        return self.gateway.finishes[request.msg_id][-1]


@pytest.fixture
async def rig(make_bus: Buses, subjects: Subjects) -> AsyncIterator[Rig]:
    rig = Rig(make_bus, subjects)
    await rig.open()
    async with rig.stack:
        yield rig


def counted(router: RouterService, name: str) -> float:
    telemetry = router.telemetry
    assert isinstance(telemetry, NullTelemetry)
    return sum(amount for (counter, _), amount in telemetry.counts.items() if counter == name)


async def known(router: RouterService, *workers: PlayedWorker) -> None:
    await until(lambda: all(worker.instance in router.loads.workers for worker in workers))


def ids(*workers: PlayedWorker) -> list[str]:
    return [task.request.request_id for worker in workers for task in worker.tasks]


async def test_a_request_goes_where_its_blocks_are(rig: Rig) -> None:
    plain, holder = await rig.worker(), await rig.worker(held=b"".join(KEYS[:4]))
    router = await rig.router()
    await known(router, plain, holder)
    await until(lambda: len(router.index) == 4)
    request = await rig.submit(100)
    await until(lambda: holder.tasks)
    [task] = holder.tasks
    assert task.request.request_id == request.request_id
    assert (task.router, task.decode_worker, task.may_be_held) == (router.instance, holder.instance, True)
    assert task.request.deadline_ms <= request.deadline_ms
    assert not plain.tasks


async def test_long_prompts_are_prefilled_apart(rig: Rig) -> None:
    worker, prefill = await rig.worker(), await rig.worker(role="prefill")
    router = await rig.router(disaggregation="always")
    await known(router, worker, prefill)
    await rig.submit(600)
    await until(lambda: prefill.tasks)
    assert prefill.tasks[0].decode_worker == worker.instance


async def test_it_waits_for_room_and_says_so(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router()
    await known(router, worker)
    first, second, third = [await rig.submit() for _ in range(3)]
    await until(lambda: len(worker.tasks) == 2)
    await until(lambda: any(held.request_id == third.request_id for _, held in rig.gateway.held))
    assert {held.stage for _, held in rig.gateway.held} == {"queued"}
    await worker.ends(first, second)
    await until(lambda: len(worker.tasks) == 3)
    assert worker.tasks[2].request.request_id == third.request_id


async def test_classes_in_order(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router()
    await known(router, worker)
    first = [await rig.submit(), await rig.submit()]
    await until(lambda: len(worker.tasks) == 2)
    batch, normal, high = await rig.submit(name="batch"), await rig.submit(), await rig.submit(name="high")
    await until(lambda: len(router.queue) == 3)
    await worker.ends(*first)
    await until(lambda: len(worker.tasks) == 4)
    assert ids(worker)[2:] == [high.request_id, normal.request_id]
    assert batch.request_id not in ids(worker)


async def test_without_workers_it_is_refused_at_once(rig: Rig) -> None:
    await rig.router()
    finish = await rig.refused(await rig.submit())
    assert (finish.error_code, finish.retry_after_s) == ("no_workers", 1.0)


async def test_a_prompt_that_no_pool_can_hold_is_refused(rig: Rig) -> None:
    worker = await rig.worker(num_blocks=4)
    await known(await rig.router(), worker)
    assert (await rig.refused(await rig.submit(100))).error_code == "no_workers"


async def test_begun_text_is_held_until_a_worker_is_back_and_holds_up_nobody(rig: Rig) -> None:
    await rig.router()
    begun = await rig.submit(num_emitted=4)
    await until(lambda: any(held.request_id == begun.request_id for _, held in rig.gateway.held))
    assert (await rig.refused(await rig.submit())).error_code == "no_workers"
    worker = await rig.worker()
    await until(lambda: worker.tasks)
    assert not rig.gateway.finishes[begun.msg_id]


async def test_begun_text_is_not_held_for_ever(rig: Rig) -> None:
    await rig.router(hold_s=0.3)
    assert (await rig.refused(await rig.submit(num_emitted=4))).error_code == "no_workers"


async def test_waiting_ends_with_429(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router(queue_ttl_s=0.3)
    await known(router, worker)
    requests = [await rig.submit() for _ in range(4)]
    for request in requests[2:]:
        finish = await rig.refused(request)
        assert (finish.error_code, finish.retry_after_s) == ("overloaded", 1.0)
    assert len(worker.tasks) == 2


async def test_what_cannot_begin_before_its_deadline_ends_with_429(rig: Rig) -> None:
    worker = await rig.worker()
    router = await rig.router()
    await known(router, worker)
    await worker.measures(prefill_tokens_per_s=100.0)
    await until(lambda: router.loads.workers[worker.instance].report)
    finish = await rig.refused(await rig.submit(300, deadline_ms=1000))
    assert finish.error_code == "overloaded" and "deadline" in finish.error_message and finish.retry_after_s == pytest.approx(3.0)
    await rig.submit(300, deadline_ms=60_000)
    await rig.submit(300, deadline_ms=1000, num_emitted=4)  # its text has begun: the client sees it end, not fail
    await until(lambda: len(worker.tasks) == 2)


async def test_a_cancelled_request_leaves_the_queue(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router()
    await known(router, worker)
    sent = [await rig.submit(), await rig.submit()]
    await until(lambda: len(worker.tasks) == 2)
    waiting = await rig.submit()
    await until(lambda: len(router.queue) == 1)
    await rig.gateway.cancel(waiting)
    await until(lambda: len(router.queue) == 0)
    await worker.ends(*sent)
    after = await rig.submit()
    await until(lambda: len(worker.tasks) == 3)
    assert ids(worker)[2] == after.request_id


async def test_what_its_gateway_does_not_want_is_dropped(rig: Rig) -> None:
    """A router in its first seconds may have missed the cancel, and asks."""
    worker = await rig.worker()
    rig.gateway.wants = lambda asked: asked.epoch == 1
    router = await rig.router()
    await known(router, worker)
    dead = await rig.submit(epoch=0)
    wanted = await rig.submit(epoch=1)
    await until(lambda: worker.tasks and counted(router, "router_dropped"))
    assert ids(worker) == [wanted.request_id]
    assert dead.request_id in [asked.request_id for asked in rig.gateway.asked]


async def test_two_routers_share_the_queue_and_book_the_same(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=64, num_blocks=4096)
    routers = [await rig.router(), await rig.router()]
    for router in routers:
        await known(router, worker)
    requests = [await rig.submit() for _ in range(40)]
    await until(lambda: len(worker.tasks) == 40)
    assert sorted(ids(worker)) == sorted(request.request_id for request in requests)
    for router in routers:
        await until(lambda router=router: len(router.loads.workers[worker.instance].bookings) == 40)
    await worker.ends(*requests)
    for router in routers:
        await until(lambda router=router: router.loads.workers[worker.instance].num_requests == 0)


async def test_lost_events_are_made_good_and_indexes_are_equal(rig: Rig) -> None:
    worker = await rig.worker(held=b"".join(KEYS[:3]))
    routers = [await rig.router(), await rig.router()]
    for router in routers:
        await until(lambda router=router: len(router.index) == 3)
    batch = KvEventBatch(worker.instance, "worker", MODEL, 1, 7, [BlocksStored("device", KEYS[2], KEYS[5])])
    worker.held = b"".join(KEYS[:6])
    worker.sequence = 7
    await rig.bus.publish(rig.subjects.kv_event(worker.instance), encode(batch))
    for router in routers:
        await until(lambda router=router: len(router.index) == 6)
    assert routers[0].index.dump() == routers[1].index.dump()


async def test_the_queue_of_a_dead_worker_goes_with_its_blocks(rig: Rig) -> None:
    dead, alive = await rig.worker(held=b"".join(KEYS[:3])), await rig.worker()
    router = await rig.router()
    await known(router, dead, alive)
    await until(lambda: len(router.index) == 3)
    await dead.die()
    await until(lambda: dead.instance not in router.loads.workers and len(router.index) == 0)
    again = PlayedWorker(await rig.make_bus(), rig.subjects, MODEL)
    again.instance = dead.instance
    await rig.submit()
    await until(lambda: alive.tasks)
    assert len(alive.tasks) == 1


async def test_killed_between_task_and_ack_means_at_most_a_second_task(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, other = await rig.worker(), await rig.worker()
    first = await rig.router()
    await known(first, worker, other)
    never = asyncio.Event()

    async def lost(delivery: object) -> None:
        await never.wait()

    monkeypatch.setattr("services.router.dispatch.acknowledge", lost)
    request = await rig.submit()
    await until(lambda: worker.tasks or other.tasks)
    await first.cancel_tasks()  # as if killed: what it held comes back when ack_wait has passed
    monkeypatch.undo()
    second = await rig.router()
    await known(second, worker, other)
    await until(lambda: any(asked.request_id == request.request_id for asked in rig.gateway.asked) and counted(second, "router_routed"))
    await until(lambda: len(second.queue) == 0)
    tasks = [*worker.tasks, *other.tasks]
    assert 1 <= len(tasks) <= 2
    assert len({task.decode_worker for task in tasks}) == len(tasks), "the same worker gets it once: the stream drops the second"


async def test_a_full_queue_at_a_worker_means_another_choice(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await rig.worker()
    router = await rig.router()
    await known(router, worker)
    enqueue, refusals = router.bus.enqueue, iter([QueueFull("full")])

    async def full_once(*arguments: Any, **named: Any) -> bool:
        for refusal in refusals:
            raise refusal
        return await enqueue(*arguments, **named)

    monkeypatch.setattr(router.bus, "enqueue", full_once)
    await rig.submit()
    await until(lambda: worker.tasks)
    assert counted(router, "router_requeued") == 1
    assert len(router.loads.workers[worker.instance].bookings) == 1


async def test_a_task_that_is_given_up_ends_the_request(rig: Rig) -> None:
    worker = await rig.worker(acks=False)
    router = await rig.router()
    await known(router, worker)
    request = await rig.submit()
    await until(lambda: worker.tasks)
    await router._dispatcher.dead_letter(encode(worker.tasks[0]), rig.subjects.decode(worker.instance))
    assert (await rig.refused(request)).error_code == "worker_lost"
    assert router.loads.workers[worker.instance].num_requests == 0


async def test_two_hundred_that_wait_are_all_told_of(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router(max_queued=100)
    await known(router, worker)
    requests = [await rig.submit() for _ in range(90)]
    await until(lambda: len(router.queue) >= 88)
    await until(lambda: len({held.request_id for _, held in rig.gateway.held}) >= 88)
    while len(worker.tasks) < len(requests):  # all of them come through, whatever was paused
        sent = [task.request for task in worker.tasks]
        await worker.ends(*sent)
        await until(lambda sent=sent: len(worker.tasks) > len(sent))
    assert sorted(ids(worker)) == sorted(request.request_id for request in requests)


async def test_more_than_it_may_hold_stay_in_the_stream(rig: Rig) -> None:
    worker = await rig.worker(max_num_seqs=1)
    router = await rig.router(max_queued=5)
    await known(router, worker)
    requests = [await rig.submit() for _ in range(30)]
    while len(worker.tasks) < len(requests):
        sent = [task.request for task in worker.tasks]
        await worker.ends(*sent)
        await until(lambda sent=sent: len(worker.tasks) > len(sent))
    assert sorted(ids(worker)) == sorted(request.request_id for request in requests)


async def test_garbage_is_dropped_and_counted(rig: Rig) -> None:
    worker = await rig.worker()
    router = await rig.router()
    await known(router, worker)
    await rig.submit()
    await until(lambda: worker.tasks)
    await rig.bus.enqueue(rig.subjects.request("normal", MODEL), b"\xff garbage", msg_id="x")
    for subject in (
        rig.subjects.kv_event(worker.instance),
        rig.subjects.load_event(worker.instance),
        rig.subjects.route_event("f" * 8),
        rig.subjects.cancel(),
    ):
        await rig.bus.publish(subject, b"\xff garbage")
    await until(lambda: counted(router, "malformed_messages") == 5)
    await rig.submit()
    await until(lambda: len(worker.tasks) == 2)


def prompt_of(count: int) -> bytes:
    return pack_tokens(random.Random(1).choices(range(49_152), k=count))


async def test_who_looks_alike_follows_before_the_blocks_are_known(rig: Rig) -> None:
    """Nobody holds a block yet, the loads are equal: only the Route of the first tells where others should go."""
    workers = [await rig.worker(max_num_seqs=64, num_blocks=4096) for _ in range(4)]
    routers = [await rig.router(), await rig.router()]
    for router in routers:
        await known(router, *workers)
    await rig.submit(800, token_ids=prompt_of(800))
    await until(lambda: ids(*workers) and all(len(router.similarity) for router in routers))
    [first] = [worker for worker in workers if worker.tasks]
    for _ in range(4):
        await first.ends(*[task.request for task in first.tasks])
        await until(lambda: all(router.loads.workers[first.instance].num_requests == 0 for router in routers))
        request = await rig.submit(800, token_ids=prompt_of(800))
        await until(lambda request=request: request.request_id in ids(*workers))
    assert len(first.tasks) == 5


async def test_weights_are_read_and_nonsense_is_refused(rig: Rig) -> None:
    plain, holder = await rig.worker(), await rig.worker(held=b"".join(KEYS[:4]))
    router = await rig.router()
    await known(router, plain, holder)
    await until(lambda: len(router.index) == 4)
    bucket = await rig.bus.bucket(rig.subjects.bucket("config"))
    await bucket.put("planner.weights", b'{"high": {}, "normal": {"uncached_blocks": -1.0}, "batch": {}}')
    await until(lambda: router._decider._weights["normal"].values[0] == -1.0)
    for bad in (b'{"uncached_blocks": 1e300}', b'{"uncached_blocks": NaN}', b'{"unknown": 1}', b'{"latency_s": "x"}'):
        before = counted(router, "router_bad_settings")
        await bucket.put("planner.weights", b'{"high": {}, "normal": %s, "batch": {}}' % bad)
        await until(lambda before=before: counted(router, "router_bad_settings") > before)
    for bad in (b"\xff", b'{"high": {}, "normal": {}}'):
        before = counted(router, "router_bad_settings")
        await bucket.put("planner.weights", bad)
        await until(lambda before=before: counted(router, "router_bad_settings") > before)
    await bucket.put("router.terms", b"garbage")
    await until(lambda: counted(router, "router_bad_settings") == 7)
    await rig.submit(100)
    await until(lambda: plain.tasks or holder.tasks)
    assert plain.tasks, "the last good weights stay"


async def test_one_router_writes_the_terms_and_all_take_them(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.settings.LOOK_S", 0.05)
    monkeypatch.setattr("services.router.settings.MIN_PROMPTS", 3)
    routers = [await rig.router(), await rig.router()]
    for router in routers:
        for number in range(16):
            router._settings.see(make_request(number, list(range(number, 400))))
    for router in routers:
        await until(lambda router=router: router.similarity.version >= 1)
    assert len({router.similarity.version for router in routers}) == 1
    assert counted(routers[0], "router_bad_settings") == 0


async def test_the_chosen_host_is_told_what_will_be_wanted(rig: Rig) -> None:
    """Its SSD has the blocks: they may climb while the request queues."""
    worker = await rig.worker(host="12345678")
    router = await rig.router()
    await known(router, worker)
    bucket = await rig.bus.bucket(rig.subjects.bucket("config"))
    card = ModelCard("m", bytes(32), "/m", 16, 2048, 100, [0], "exact", "float32", "0" * 16, 1)
    await bucket.put(f"model.{MODEL}", encode(card))
    await until(lambda: MODEL in router._settings.model_digests)
    stored = KvSnapshot("12345678", 1, 0, [BlocksStored("ssd", b"", b"".join(KEYS[:5]))])
    assert router.index.install("12345678", [stored])
    wanted: list[KvPrefetch] = []

    async def prefetch(message: Message) -> bytes:
        wanted.append(decode(KvPrefetch, message.payload))
        return b""

    await rig.bus.serve(rig.subjects.kv("12345678", "prefetch"), prefetch)
    await rig.submit(100)
    await until(lambda: wanted)
    assert wanted[0].block_keys == b"".join(KEYS[:5])
