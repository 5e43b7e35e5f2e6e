"""A worker that is played by the test: it has a lease and a queue, keeps what it is sent, and says what it is told to say."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec

from shared.bus.base import Bus, Delivery
from shared.errors import BusClosed
from shared.messages.codec import decode, encode
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.kv import BlocksStored, KvSnapshot
from shared.messages.request import DecodeTask, GenerateRequest, PrefillTask
from shared.messages.subjects import Subjects
from shared.service import mint_instance
from tests.support.leases import make_lease, put_lease

RENEW_S = 0.5


class PlayedWorker:
    """`held` blocks stand in its snapshot. Without `acks` its tasks come back to it."""

    def __init__(self, bus: Bus, subjects: Subjects, model: str, held: bytes = b"", *, acks: bool = True, **lease: Any) -> None:
        self.bus, self.subjects = bus, subjects
        self.instance = mint_instance()
        fields = {"role": "decode", "max_num_seqs": 4, "num_blocks": 256, "block_size": 16, "prefill_budget": 32} | lease
        self.lease: WorkerLease = make_lease(self.instance, model=model, **fields)
        self.tasks: list[DecodeTask | PrefillTask] = []
        self.held = held
        self.sequence = 0
        self._acks = acks
        self._loads = itertools.count(1)
        self._renewing: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        is_prefill = self.lease.role == "prefill"
        queue = "prefill" if is_prefill else "decode"
        subject = self.subjects.prefill(self.instance) if is_prefill else self.subjects.decode(self.instance)
        await self.bus.serve(self.subjects.worker(self.instance, "snapshot"), self._snapshot)
        consumer = await self.bus.consume(
            self.subjects.stream(queue), self.subjects.durable(queue, self.instance), subject, window=16, max_deliver=3
        )

        async def take() -> None:
            while True:
                try:
                    delivery: Delivery = await consumer.next()
                except BusClosed:
                    return
                self.tasks.append(decode(PrefillTask if is_prefill else DecodeTask, delivery.message.payload))
                if self._acks:
                    await delivery.ack()

        async def renew() -> None:
            for sequence in itertools.count(2):
                await asyncio.sleep(RENEW_S)
                await put_lease(self.bus, self.subjects, msgspec.structs.replace(self.lease, sequence=sequence))

        await put_lease(self.bus, self.subjects, self.lease)
        self._renewing = [asyncio.create_task(take()), asyncio.create_task(renew())]

    async def close(self) -> None:
        for task in self._renewing:
            task.cancel()
        await asyncio.gather(*self._renewing, return_exceptions=True)

    async def die(self) -> None:
        """Its lease is deleted; its queue stays as it is."""
        await self.close()
        await (await self.bus.bucket(self.subjects.bucket("workers"))).delete(f"{self.lease.role}.{self.instance}")

    async def ends(self, *requests: GenerateRequest) -> None:
        """A WorkerLoad: these requests are over, and nothing else is here."""
        ended = [EndedRequest(request.request_id, request.epoch) for request in requests]
        assert self.lease.role in ("decode", "prefill") and self.lease.model
        load = WorkerLoad(self.instance, "decode", self.lease.model, next(self._loads), 0, 0, 0, self.lease.num_blocks, 0, ended=ended)
        await self.bus.publish(self.subjects.load_event(self.instance), encode(load))

    async def measures(self, prefill_tokens_per_s: float) -> None:
        """A WorkerLoad: nothing is here, and prompts are computed so fast."""
        assert self.lease.role in ("decode", "prefill") and self.lease.model
        load = WorkerLoad(
            self.instance,
            "decode",
            self.lease.model,
            next(self._loads),
            0,
            0,
            0,
            self.lease.num_blocks,
            0,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        await self.bus.publish(self.subjects.load_event(self.instance), encode(load))

    async def _snapshot(self, _message: object) -> bytes:
        entries = [BlocksStored("device", b"", self.held)] if self.held else []
        return encode(KvSnapshot(self.instance, 1, self.sequence, entries))
