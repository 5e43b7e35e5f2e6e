"""Who holds which blocks, and until when. Pure: the clock is injected."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

from services.kvstore.tiers.index import Block
from shared.errors import LeaseExpired

LEASE_TTL_S = 5.0
"""A lease spans a memcpy, never a forward pass."""
PIN_TTL_S = 10.0


class Lease:
    """Blocks lent to one worker: `write` (reserved slots, not in the index yet) or `read`."""

    __slots__ = ("blocks", "deadline_s", "kept", "kind", "lease_id", "number", "worker")

    def __init__(self, lease_id: int, kind: Literal["read", "write"], worker: str, blocks: list[Block], kept: list[Block]) -> None:
        self.lease_id = lease_id
        self.kind = kind
        self.worker = worker
        self.blocks = blocks
        self.kept = kept
        """write: held blocks that the reserved ones hang from, so that they do not go in between."""
        self.number = 0
        """write: the worker's own number of its reservation."""
        self.deadline_s = 0.0


class Leases:
    """All live leases. Ids are never given twice within an epoch; all TTLs are equal, so the queue is in order of deadline."""

    def __init__(self, monotonic: Callable[[], float], first_id: int, ttl_s: float = LEASE_TTL_S) -> None:
        self._monotonic = monotonic
        self._next_id = first_id
        self.ttl_s = ttl_s
        self._live: dict[int, Lease] = {}
        self._queue: deque[Lease] = deque()

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, kind: Literal["read", "write"], worker: str, blocks: list[Block], kept: list[Block]) -> Lease:
        """A new lease from now on."""
        lease = Lease(self._next_id, kind, worker, blocks, kept)
        self._next_id += 1
        lease.deadline_s = self._monotonic() + self.ttl_s
        self._live[lease.lease_id] = lease
        self._queue.append(lease)
        return lease

    def end(self, lease_id: int, worker: str, kind: Literal["read", "write"] | None = None) -> Lease:
        """Take out a lease that `worker` holds. Raises LeaseExpired if there is none (never given, run out, used already)."""
        lease = self._live.get(lease_id)
        if lease is None or lease.worker != worker or (kind is not None and lease.kind != kind):
            raise LeaseExpired(lease_id)
        del self._live[lease_id]
        return lease

    def run_out(self) -> list[Lease]:
        """Take out the leases whose time is over."""
        now = self._monotonic()
        gone = []
        while self._queue and (self._queue[0].deadline_s <= now or self._queue[0].lease_id not in self._live):
            lease = self._queue.popleft()
            if self._live.pop(lease.lease_id, None) is not None:
                gone.append(lease)
        return gone

    def live(self) -> list[Lease]:
        """For tests and status."""
        return list(self._live.values())


class Pins:
    """Blocks committed for a handoff, kept until acquired or 10 s, for at most a quarter of the tier."""

    def __init__(self, monotonic: Callable[[], float], max_bytes: int, ttl_s: float = PIN_TTL_S) -> None:
        self._monotonic = monotonic
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self.num_bytes = 0
        self._live: dict[Block, float] = {}
        self._queue: deque[tuple[float, Block]] = deque()

    def __len__(self) -> int:
        return len(self._live)

    def pin(self, block: Block) -> Literal["pinned", "renewed", "full"]:
        """`pinned`: the caller holds the block until it is let go; `renewed`: it was pinned already."""
        renewed = block in self._live
        if not renewed and self.num_bytes + block.size_class.slot_bytes > self.max_bytes:
            return "full"
        deadline_s = self._monotonic() + self._ttl_s
        if not renewed:
            self.num_bytes += block.size_class.slot_bytes
        self._live[block] = deadline_s
        self._queue.append((deadline_s, block))
        return "renewed" if renewed else "pinned"

    def let_go(self, block: Block) -> bool:
        """The block was acquired, or dropped. True if it was pinned."""
        if self._live.pop(block, None) is None:
            return False
        self.num_bytes -= block.size_class.slot_bytes
        return True

    def run_out(self) -> list[Block]:
        """Let go of the pins whose time is over."""
        now = self._monotonic()
        gone = []
        while self._queue and self._queue[0][0] <= now:
            deadline_s, block = self._queue.popleft()
            if self._live.get(block) == deadline_s and self.let_go(block):
                gone.append(block)
        return gone
