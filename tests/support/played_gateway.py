"""A gateway that is played by the test: takes tokens in order and answers workers, as far as the test does not say otherwise."""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable

from shared.bus.base import Bus, Message
from shared.messages.codec import decode, decode_union, encode
from shared.messages.fleet import WorkerLease
from shared.messages.request import Cancel, GenerateRequest
from shared.messages.session import (
    Finish,
    FinishReply,
    HeldRequest,
    Progress,
    Resend,
    ResendReply,
    TokenBatch,
    TokenMessage,
    Wanted,
    WantedReply,
)
from shared.messages.subjects import Subjects
from shared.service import mint_instance
from shared.types import InstanceId, pack_tokens, unpack_tokens
from tests.support.waiting import until

RENEW_S = 0.5


class PlayedGateway:
    """Its lease is renewed until `close` or `die`."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self.bus = bus
        self.subjects = subjects
        self.instance = mint_instance()
        self.output: defaultdict[str, list[int]] = defaultdict(list)
        """Tokens by `request_id:epoch`, without gaps; a resubmission begins with what was emitted before."""
        self.finishes: defaultdict[str, list[Finish]] = defaultdict(list)
        self.held: list[tuple[Progress, HeldRequest]] = []
        self.asked: list[Wanted] = []
        self.num_batches = 0
        self.wants: Callable[[Wanted], bool] = lambda asked: True
        self.loses: Callable[[TokenBatch], bool] = lambda batch: False
        """Batches that never arrived."""
        self.is_deaf = False
        """Finishes get no answer that could be read."""
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._bucket = await self.bus.bucket(self.subjects.bucket("workers"))
        await self._renew(1)
        tokens = await self.bus.subscribe(self.subjects.tokens(self.instance))
        await self.bus.serve(self.subjects.session(self.instance, "wanted"), self._on_wanted)
        await self.bus.serve(self.subjects.session(self.instance, "finish"), self._on_finish)

        async def follow() -> None:
            async for message in tokens:
                self._on_tokens(message)

        async def renew() -> None:
            for sequence in itertools.count(2):
                await asyncio.sleep(RENEW_S)
                await self._renew(sequence)

        self._tasks = [asyncio.create_task(follow()), asyncio.create_task(renew())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def die(self) -> None:
        """As a gateway that was drained: nobody answers, and its lease is gone."""
        await self.close()
        await self._bucket.delete(f"gateway.{self.instance}")

    async def finished(self, request: GenerateRequest) -> list[int]:
        """Until the request has its terminal event; its output. An error is the test's failure."""
        await until(lambda: self.finishes[request.msg_id])
        finish = self.finishes[request.msg_id][-1]
        assert not finish.error_code, finish.error_message
        await until(lambda: len(self.output[request.msg_id]) == finish.num_output_tokens)
        output = self.output[request.msg_id]
        assert finish.crc32 == zlib.crc32(pack_tokens(output))
        return output

    async def cancel(self, request: GenerateRequest) -> None:
        await self.bus.publish(self.subjects.cancel(), encode(Cancel(request.request_id, request.epoch)))

    async def resend(self, worker: InstanceId, request: GenerateRequest, index: int) -> ResendReply:
        asked = encode(Resend(request.request_id, request.epoch, index))
        reply = await self.bus.request(self.subjects.worker(worker, "resend"), asked, timeout_s=5.0)
        return decode(ResendReply, reply.payload)

    async def _renew(self, sequence: int) -> None:
        lease = WorkerLease(self.instance, "gateway", "gateway", "ready", sequence, "0", 0)
        await self._bucket.put(f"gateway.{self.instance}", encode(lease))

    def _on_tokens(self, message: Message) -> None:
        match decode_union(TokenMessage, message.payload):
            case TokenBatch() as batch:
                self.num_batches += 1
                for delta in () if self.loses(batch) else batch.deltas:
                    output = self.output[f"{delta.request_id}:{delta.epoch}"]
                    if delta.index <= len(output):
                        output += delta.token_ids[len(output) - delta.index :]
            case Progress() as progress:
                self.held += [(progress, held) for held in progress.held]

    async def _on_wanted(self, message: Message) -> bytes:
        asked = decode(Wanted, message.payload)
        self.asked.append(asked)
        return encode(WantedReply(self.wants(asked)))

    async def _on_finish(self, message: Message) -> bytes:
        finish = decode(Finish, message.payload)
        key = f"{finish.request_id}:{finish.epoch}"
        self.finishes[key].append(finish)
        if self.is_deaf:
            return b"?"
        output, last = self.output[key], unpack_tokens(finish.last_token_ids)
        first = finish.num_output_tokens - len(last)
        if first <= len(output):
            output += last[len(output) - first :]
        return encode(FinishReply(len(output) >= finish.num_output_tokens or bool(finish.error_code), len(output)))
