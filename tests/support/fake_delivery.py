"""A delivery that remembers what was done with it, and requests for tests that need no gateway."""

from __future__ import annotations

from typing import Any

import msgspec

from shared.bus.base import Delivery, Message
from shared.messages.request import GenerateRequest
from shared.types import SamplingParams, pack_tokens


class FakeDelivery(Delivery):
    def __init__(self, num_delivered: int = 1, age_s: float = 0.0) -> None:
        self.message = Message("", b"")
        self.num_delivered = num_delivered
        self.stream_sequence = 1
        self.age_s = age_s
        self.done: list[str] = []

    async def ack(self) -> None:
        self.done.append("ack")

    async def in_progress(self) -> None:
        self.done.append("in_progress")

    async def term(self) -> None:
        self.done.append("term")


def make_request(number: int, prompt: list[int], max_tokens: int = 8, **fields: Any) -> GenerateRequest:
    request = GenerateRequest(
        request_id=f"{number:032x}",
        epoch=0,
        gateway="0" * 8,
        model="0" * 16,
        request_class="normal",
        token_ids=pack_tokens(prompt),
        num_emitted=0,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        salt=bytes(32),
        partition="0" * 16,
        block_keys=b"",
        deadline_ms=60_000,
        sent_at_ns=0,
    )
    return msgspec.structs.replace(request, **fields)
