"""Simulated workers in virtual time: a prefill queue, decode slots, an LRU cache of blocks, events and reports as the real ones send."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from loadtest.scenarios.policies import MODEL, POLICIES
from loadtest.scenarios.workload import BLOCK_SIZE, Prompt
from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from shared.kv.hashing import split
from shared.messages.fleet import EndedRequest, WorkerLease, WorkerLoad
from shared.messages.kv import BlocksRemoved, BlocksStored, KvEvent, KvEventBatch
from shared.messages.request import GenerateRequest
from shared.types import KEY_BYTES, SamplingParams

REPORT_S = 0.5
THINK_S = 2.0
"""Between an answer and the session's next prompt."""
WARM_UP_RATE = 1.0


class Shape(NamedTuple):
    """Of every worker."""

    num_workers: int = 4
    num_blocks: int = 24_000
    """Cached; what runs is not counted apart."""
    prefill_tokens_per_s: float = 8000.0
    step_s: float = 0.02
    max_num_seqs: int = 16


class Outcome(msgspec.Struct, frozen=True):
    """One policy on one workload."""

    policy: str
    num_requests: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    reuse: float
    """Prompt tokens that were not computed."""
    balance: float
    """Most requests at one worker, over the mean."""


class Cache:
    """An LRU of blocks; suffixes go before their parents."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def overlap(self, keys: list[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._blocks), len(keys))

    def store(self, keys: list[bytes]) -> tuple[list[bytes], list[bytes]]:
        """(new ones, evicted ones)"""
        new = [key for key in keys if key not in self._blocks]
        for key in reversed(keys):  # the first block is used last: it outlives what follows it
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        evicted = []
        while len(self._blocks) > self._capacity:
            evicted.append(self._blocks.popitem(last=False)[0])
        return new, evicted


class Worker:
    """Computes one prompt at a time, generates for all that are behind it."""

    def __init__(self, name: str, shape: Shape) -> None:
        self.name = name
        self.shape = shape
        self.cache = Cache(shape.num_blocks)
        self.waiting: deque[tuple[float, GenerateRequest]] = deque()
        self.running = 0
        self.ended: list[EndedRequest] = []
        self.sequence = 0
        self.num_events = 0
        self.num_taken = 0

    def lease(self) -> WorkerLease:
        base = WorkerLease(self.name, "decode", "w", "ready", 1, "0", 0, model=MODEL)
        return msgspec.structs.replace(
            base, max_num_seqs=self.shape.max_num_seqs, num_blocks=self.shape.num_blocks, block_size=BLOCK_SIZE, prefill_budget=256
        )

    def uncached(self, request: GenerateRequest) -> int:
        """Tokens of a prompt that it must compute."""
        cached = self.cache.overlap(split(request.block_keys, KEY_BYTES)) * BLOCK_SIZE
        return max(request.num_tokens - cached, 1)

    def report(self) -> WorkerLoad:
        self.sequence += 1
        ended, self.ended = self.ended, []
        tokens = sum(self.uncached(request) for _, request in self.waiting)
        blocks = sum(request.num_tokens // BLOCK_SIZE + 1 for _, request in self.waiting)
        rate = self.shape.prefill_tokens_per_s
        return WorkerLoad(
            self.name, "decode", MODEL, self.sequence, self.running, len(self.waiting), tokens, self.shape.num_blocks, blocks,
            prefill_tokens_per_s=rate, ended=ended,
        )  # fmt: skip

    def events(self, new: list[bytes], evicted: list[bytes]) -> KvEventBatch:
        self.num_events += 1
        events: list[KvEvent] = [BlocksStored("device", b"", b"".join(new))] if new else []
        events += [BlocksRemoved("device", b"".join(evicted))] if evicted else []
        return KvEventBatch(self.name, "worker", MODEL, 1, self.num_events, events)


class Simulation:
    """One policy over one workload. Events are (time, order, what, worker, request)."""

    def __init__(self, policy: str, prompts: list[Prompt], rate: float, shape: Shape, seed: int, warm_up: Sequence[Prompt] = ()) -> None:
        """`warm_up` comes first, at leisure, and is not counted."""
        generator = random.Random(seed)
        self.index, self.loads = PrefixIndex(), Loads()
        self.name, self.shape = policy, shape
        self.policy = POLICIES[policy](self.index, self.loads, generator)
        self.workers = {name: Worker(name, shape) for name in (f"{number:08x}" for number in range(shape.num_workers))}
        self.queue: deque[tuple[float, GenerateRequest]] = deque()
        self._order = itertools.count()
        self._events: list[tuple[float, int, str, str, GenerateRequest | None]] = []
        self.ttft_s: list[float] = []
        self.num_tokens = self.num_reused = 0
        for worker in self.workers.values():
            self.loads.lease(worker.lease(), True)
            self._at(0.0, "report", worker.name)
        now_s = 0.0
        self._next: dict[str, GenerateRequest] = {}
        """Attempt → the session's next."""
        last: dict[str, GenerateRequest] = {}
        self._uncounted: set[str] = set()
        for number, prompt in enumerate([*warm_up, *prompts]):
            request = request_of(number, prompt)
            is_counted = number >= len(warm_up)
            if not is_counted:
                self._uncounted.add(request.request_id)
            if prompt.session in last:
                self._next[last[prompt.session].msg_id] = request
            else:
                now_s += generator.expovariate(rate if is_counted else WARM_UP_RATE)
                self._at(now_s, "arrive", "", request)
            if prompt.session:
                last[prompt.session] = request
        self._left = len(warm_up) + len(prompts)

    def _at(self, time_s: float, what: str, worker: str, request: GenerateRequest | None = None) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), what, worker, request))

    def run(self) -> Outcome:
        while self._left:
            now_s, _, what, name, request = heapq.heappop(self._events)
            if what == "report":
                self.loads.report(self.workers[name].report(), now_s)
                self._at(now_s + REPORT_S, "report", name)
            elif request is not None:
                {"arrive": self._arrive, "computed": self._computed, "end": self._end}[what](now_s, name, request)
            while self.queue and self._route(now_s, *self.queue[0]):
                self.queue.popleft()
        p50_s, p90_s, p99_s = np.percentile(self.ttft_s, [50, 90, 99]).tolist()
        taken = [worker.num_taken for worker in self.workers.values()]
        balance = max(taken) * len(taken) / sum(taken)
        return Outcome(self.name, len(self.ttft_s), p50_s, p90_s, p99_s, self.num_reused / self.num_tokens, balance)

    def _arrive(self, now_s: float, _name: str, request: GenerateRequest) -> None:
        self.queue.append((now_s, request))

    def _route(self, now_s: float, arrived_s: float, request: GenerateRequest) -> bool:
        name = self.policy.choose(request)
        if name is None:
            return False
        worker = self.workers[name]
        known = self.index.overlap(split(request.block_keys, KEY_BYTES)) if request.block_keys else {}
        overlap = max((blocks for holder, blocks in known.items() if holder.source == name), default=0)
        booking = Booking(request.num_tokens // BLOCK_SIZE + 1, max(request.num_tokens - overlap * BLOCK_SIZE, 1), now_s)
        self.loads.book(request.msg_id, name, booking)
        worker.num_taken += request.request_id not in self._uncounted
        worker.waiting.append((arrived_s, request))
        if len(worker.waiting) == 1:
            self._compute(now_s, worker)
        return True

    def _compute(self, now_s: float, worker: Worker) -> None:
        _, request = worker.waiting[0]
        uncached = worker.uncached(request)
        if request.request_id not in self._uncounted:
            self.num_tokens += request.num_tokens
            self.num_reused += request.num_tokens - uncached
        took_s = uncached / self.shape.prefill_tokens_per_s + self.shape.step_s
        self._at(now_s + took_s, "computed", worker.name, request)

    def _computed(self, now_s: float, name: str, request: GenerateRequest) -> None:
        worker = self.workers[name]
        arrived_s, _ = worker.waiting.popleft()
        if request.request_id not in self._uncounted:
            self.ttft_s.append(now_s - arrived_s)
        worker.running += 1
        self.index.apply(worker.events(*worker.cache.store(split(request.block_keys, KEY_BYTES))))
        self._at(now_s + request.sampling.max_tokens * self.shape.step_s, "end", name, request)
        if worker.waiting:
            self._compute(now_s, worker)

    def _end(self, now_s: float, name: str, request: GenerateRequest) -> None:
        worker = self.workers[name]
        worker.running -= 1
        worker.ended.append(EndedRequest(request.request_id, request.epoch))
        self._left -= 1
        if request.msg_id in self._next:
            self._at(now_s + THINK_S, "arrive", "", self._next[request.msg_id])


def request_of(number: int, prompt: Prompt) -> GenerateRequest:
    return GenerateRequest(
        request_id=hashlib.md5(str(number).encode()).hexdigest(),
        epoch=0,
        gateway="0" * 8,
        model=MODEL,
        request_class="normal",
        token_ids=prompt.packed,
        num_emitted=0,
        sampling=SamplingParams(max_tokens=prompt.num_output_tokens),
        salt=bytes(32),
        partition="0" * 16,
        block_keys=prompt.block_keys,
        deadline_ms=600_000,
        sent_at_ns=0,
    )
