"""One prefill task, as the worker holds it."""

from __future__ import annotations

import asyncio

from shared.bus.base import Delivery
from shared.engine.sequence import Sequence
from shared.kv.slot_copy import BlockToStore
from shared.messages.request import GenerateRequest, PrefillTask
from shared.messages.session import HeldRequest
from shared.types import unpack_tokens
from shared.worker.chain import Chain


class Job:
    """`num_target_tokens` are the tokens of the prompt's full blocks, at most to the token before the last: decode computes the rest."""

    def __init__(self, task: PrefillTask, delivery: Delivery, chain: Chain | None, block_size: int, now_s: float) -> None:
        request = task.request
        self.task = task
        self.delivery = delivery
        self.chain = chain
        """None: a task of another model digest, handed on without any reuse."""
        self.taken_s = now_s
        self.traceparent = ""
        """Of its span, which the store's spans are children of."""
        self.is_cancelled = False
        self.fate = ""
        """Why nobody wants it any more."""
        self.is_placed = False
        self.beside: asyncio.Task[None] | None = None
        """The load of its prefix, while that is under way."""
        self.sequence = Sequence(
            f"{request.request_id}:{request.epoch}", unpack_tokens(request.token_ids), request.num_prompt_tokens, request.sampling
        )
        self.num_target_tokens = (request.num_tokens - 1) // block_size * block_size if chain is not None else 0
        self.num_cached_tokens = 0
        self.stores: list[asyncio.Task[None]] = []
        """Chunks on their way into the store, in order."""
        self.is_copied = asyncio.Event()
        """Nothing is copied out of its blocks any more, and what lies in the store is known."""
        self.num_found_blocks = 0
        """Blocks of these that can be found there."""

    @property
    def request(self) -> GenerateRequest:
        return self.task.request

    @property
    def num_left_tokens(self) -> int:
        return max(self.num_target_tokens - self.sequence.num_computed_tokens, 0)

    def abandon(self, fate: str = "cancelled") -> None:
        self.is_cancelled, self.fate = True, fate
        for task in (self.beside, *self.stores):
            if task is not None:
                task.cancel()

    def add_store(self, store: asyncio.Task[None]) -> None:
        """Another chunk's, behind the others."""
        self.is_copied.clear()
        self.stores.append(store)
        store.add_done_callback(self._store_ended)

    def _store_ended(self, _: asyncio.Task[None]) -> None:
        if all(store.done() for store in self.stores):
            self.is_copied.set()

    def compute_no_more(self) -> None:
        """What is computed goes on to decode, which does the rest."""
        self.num_target_tokens = self.sequence.num_computed_tokens

    def held(self) -> HeldRequest:
        """For Progress."""
        return HeldRequest(
            self.request.request_id, self.request.epoch, "prefill" if self.is_placed else "waiting", self.request.num_emitted
        )

    def blocks(self, start: int, end: int, block_size: int) -> list[BlockToStore]:
        """Full blocks `start` to `end` of the prompt."""
        assert self.chain is not None
        packed, step = self.request.token_ids, 4 * block_size
        return [
            BlockToStore(
                self.chain.hashes[index],
                self.chain.parent(index),
                packed[index * step : (index + 1) * step],
                self.sequence.block_table[index],
                self.request.partition,
            )
            for index in range(start, end)
        ]
