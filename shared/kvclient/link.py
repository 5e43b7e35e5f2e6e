"""The store's process as one worker reaches it: its arena, its answers, and the pause after it gave none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.bus.base import Bus
from shared.errors import BusTimeout, KvError, NoResponders, StoreAbsent
from shared.kv.arena import Arena
from shared.kv.attachment import Attachment
from shared.messages import kv
from shared.messages.codec import decode_union, encode
from shared.messages.subjects import KvVerb, Subjects
from shared.telemetry import Telemetry
from shared.types import HostId, InstanceId

_log = logging.getLogger(__name__)
T = TypeVar("T")

ANSWER_S = 1.0
INLINE_BLOCKS = 8
INLINE_BYTES = 1 << 16
"""A copy no larger than this takes less time than the way to a thread and back."""
RETRY_S = 1.0
"""After a store did not answer, or has no arena, it is left alone for so long."""


class StoreLink:
    """`host` is None while there is no store; it is looked for again once a second."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        telemetry: Telemetry,
        instance: InstanceId,
        kv_dir: Path | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._attachment = Attachment(kv_dir, instance)
        self._retry_at_s = 0.0
        self._num_copies = 0
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kv-copy")

    @property
    def host(self) -> HostId | None:
        arena = self._attachment.arena
        return arena.host if arena is not None else None

    async def open(self) -> None:
        """Map the arena, if there is one. No store is no fault."""
        await self.in_thread(self._attachment.attach)

    async def close(self) -> None:
        """Unmap, after the copies under way. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)
        self._attachment.close()

    async def attached(self) -> Arena:
        """The arena as it is now. Raises StoreAbsent while the store is left alone or has no arena."""
        if self._monotonic() < self._retry_at_s:
            raise StoreAbsent(self.host or "")
        if self._attachment.arena is None:
            await self.in_thread(self._attachment.attach)
        if self._attachment.arena is None:
            self._retry_at_s = self._monotonic() + RETRY_S
            raise StoreAbsent("")
        return self._attachment.arena

    def _leave_alone(self) -> None:
        """The store did not answer: pause, and map again if it has made a new arena meanwhile."""
        self._retry_at_s = self._monotonic() + RETRY_S
        self._attachment.check()
        if not self._num_copies:
            self._attachment.unmap_retired()

    def fault(self, operation: str, error: Exception) -> str:
        """Count a fault and name it; it is a miss."""
        reason = getattr(error, "code", "kv_error")
        if isinstance(error, NoResponders | BusTimeout | StoreAbsent):
            reason = "store_absent"
        if isinstance(error, NoResponders | BusTimeout):
            _log.warning("the KV store does not answer (%s): computing without it for %g s", operation, RETRY_S)
            self._leave_alone()
        self._telemetry.count("kvclient_faults", 1, operation=operation, reason=reason)
        return str(reason)

    async def ask(self, verb: KvVerb, message: msgspec.Struct, reply_type: type[T], timeout_s: float = ANSWER_S) -> T:
        """One request to the store; its typed refusal is raised as KvError."""
        host = self.host
        if host is None:
            raise StoreAbsent("")
        reply = await self._bus.request(self._subjects.kv(host, verb), encode(message), timeout_s=timeout_s)
        answer = decode_union(reply_type | kv.KvError, reply.payload)
        if isinstance(answer, kv.KvError):
            refusal = KvError(answer.message)
            refusal.code = answer.code  # type: ignore[misc]
            raise refusal
        return answer  # type: ignore[no-any-return]

    async def tell(self, verb: KvVerb, message: msgspec.Struct) -> None:
        """The same without waiting for an answer; if it is lost, the lease runs out."""
        if self.host is not None:
            await self._bus.publish(self._subjects.kv(self.host, verb), encode(message))

    async def copy(self, work: Callable[[], T], num_blocks: int, num_bytes: int, *, in_memory: bool) -> T:
        """Run `work`, which copies that much: here if it is little and between memory and memory, else in a copy thread."""
        if in_memory and num_blocks <= INLINE_BLOCKS and num_bytes <= INLINE_BYTES:
            return work()
        return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` in a copy thread. If the caller is cancelled, wait for it all the same: nobody may reuse the memory before."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._num_copies += 1
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        finally:
            self._num_copies -= 1
