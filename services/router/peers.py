"""Routers that know, and one that joins them: bookings and index come from a peer, instead of from every worker and store there is."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from services.router.index import PrefixIndex
from services.router.load import Booking, Loads
from services.router.sync import IndexSync
from shared.bus.base import Bus, Message
from shared.errors import BusClosed, BusError, MalformedMessage
from shared.fleet import Fleet
from shared.kv.hashing import split
from shared.messages.codec import decode, encode
from shared.messages.kv import KvSnapshot
from shared.messages.router import BookedRequest, RouterSnapshot, RouterSnapshotRequest
from shared.messages.subjects import Subjects
from shared.telemetry import Telemetry
from shared.types import KEY_BYTES, InstanceId

PAGE_BYTES = 400_000
BOOKED_BYTES = 80
"""About what one booking takes."""
MAX_CUTS = 2
"""Kept at once: as many can be read at once."""
KEEP_S = 10.0
MAX_PEERS = 2
"""Asked one after the other."""
LEARN_S = 1.5
"""For one peer."""

log = logging.getLogger(__name__)


class Cut:
    """What was known at one moment, in parts that go over the wire."""

    def __init__(self, booked: Sequence[BookedRequest], sources: Sequence[KvSnapshot]) -> None:
        self.cut_id = secrets.token_hex(8)
        self.used_s = time.monotonic()
        self._parts: list[BookedRequest | KvSnapshot] = [*booked, *sources]

    def page(self, cursor: int) -> RouterSnapshot:
        """As many parts from `cursor` on as a message holds."""
        booked: list[BookedRequest] = []
        sources: list[KvSnapshot] = []
        num_bytes, at = 0, cursor
        while at < len(self._parts) and num_bytes < PAGE_BYTES:
            part = self._parts[at]
            if isinstance(part, BookedRequest):
                booked.append(part)
                num_bytes += BOOKED_BYTES
            else:
                sources.append(part)
                num_bytes += BOOKED_BYTES + sum(len(entry.block_keys) for entry in part.entries)
            at += 1
        return RouterSnapshot(self.cut_id, booked, sources, at if at < len(self._parts) else None)


class IndexPageRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The same as RouterSnapshotRequest, as JSON."""

    cut: str = ""
    cursor: int = 0


class IndexPage(msgspec.Struct):
    """One page of an index for people and tests, as JSON: sorted keys in hex, by source and tier."""

    cut: str
    sources: dict[str, dict[str, list[str]]]
    next_cursor: int | None = None


class Peers:
    """Answers `snapshot` (for routers) and `index` (for people), and learns from the routers that were here before."""

    def __init__(
        self, bus: Bus, subjects: Subjects, telemetry: Telemetry, fleet: Fleet, index: PrefixIndex, loads: Loads, sync: IndexSync
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._telemetry = telemetry
        self._fleet = fleet
        self._index = index
        self._loads = loads
        self._sync = sync
        self._cuts: OrderedDict[str, Cut] = OrderedDict()

    async def open(self, instance: InstanceId) -> None:
        """Answer from now on."""
        await self._bus.serve(self._subjects.router(instance, "snapshot"), self._tell)
        await self._bus.serve(self._subjects.router(instance, "index"), self._describe)

    # -- telling -------------------------------------------------------------------------------------------------------
    async def _tell(self, message: Message) -> bytes:
        return encode(await self._page(decode(RouterSnapshotRequest, message.payload)))

    async def _describe(self, message: Message) -> bytes:
        """Nothing asked: how many blocks of whom are known. `{"cursor": 0}`: which ones, by pages."""
        if not message.payload:
            return msgspec.json.encode(self._index.summary())
        try:
            asked = msgspec.json.decode(message.payload, type=IndexPageRequest)
        except msgspec.MsgspecError as error:
            raise MalformedMessage("index", str(error)) from error
        page = await self._page(RouterSnapshotRequest(asked.cut, asked.cursor))
        found: dict[str, dict[str, list[str]]] = {}
        for source in page.sources:
            for entry in source.entries:
                found.setdefault(source.source, {}).setdefault(entry.tier, []).extend(
                    key.hex() for key in split(entry.block_keys, KEY_BYTES)
                )
        return msgspec.json.encode(IndexPage(page.cut, found, page.next_cursor))

    async def _page(self, asked: RouterSnapshotRequest) -> RouterSnapshot:
        cut = self._cuts.get(asked.cut) if asked.cut else await self._take_cut()
        if cut is None:
            return RouterSnapshot("", [], [])
        cut.used_s = time.monotonic()
        page = cut.page(asked.cursor)
        if page.next_cursor is None:
            self._cuts.pop(cut.cut_id, None)
        return page

    async def _take_cut(self) -> Cut:
        now_s, booked, content = time.monotonic(), self._booked(), self._index.content()
        cut = Cut(booked, await asyncio.to_thread(lambda: list(content.snapshots())))
        for cut_id in [cut_id for cut_id, old in self._cuts.items() if now_s - old.used_s > KEEP_S]:
            del self._cuts[cut_id]
        self._cuts[cut.cut_id] = cut
        while len(self._cuts) > MAX_CUTS:
            self._cuts.popitem(last=False)
        return cut

    def _booked(self) -> list[BookedRequest]:
        now_s, found = time.monotonic(), []
        for worker, state in self._loads.workers.items():
            for key, booking in state.bookings.items():
                request_id, _, epoch = key.rpartition(":")
                age_s = now_s - booking.booked_s
                found.append(BookedRequest(request_id, int(epoch), worker, booking.num_blocks, booking.num_tokens, age_s))
        return found

    # -- learning ------------------------------------------------------------------------------------------------------
    async def learn(self, instance: InstanceId) -> None:
        """From the oldest of the others, if there are any; what is not learned so, the sources themselves tell."""
        peers = [lease.instance for lease in self._fleet.workers("router") if lease.instance != instance][:MAX_PEERS]
        ended = self._loads.watch_ends()
        try:
            for peer in peers:
                try:
                    async with asyncio.timeout(LEARN_S):
                        pages = await self._pages_of(peer)
                except BusClosed:
                    raise
                except (BusError, TimeoutError) as error:
                    self._telemetry.count("router_joins", outcome=getattr(error, "code", "timeout"))
                    log.warning("router %s did not tell what it knows: %s", peer, error)
                    continue
                self._book([booked for page in pages for booked in page.booked], ended)
                await self._sync.learn([source for page in pages for source in page.sources])
                self._telemetry.count("router_joins", outcome="learned")
                return
            if not peers:
                self._telemetry.count("router_joins", outcome="alone")
        finally:
            self._loads.watch_no_ends()
            self._sync.begin()

    async def _pages_of(self, peer: InstanceId) -> list[RouterSnapshot]:
        pages: list[RouterSnapshot] = []
        asked = RouterSnapshotRequest()
        while True:
            reply = await self._bus.request(self._subjects.router(peer, "snapshot"), encode(asked), timeout_s=LEARN_S)
            page = decode(RouterSnapshot, reply.payload)
            if not page.cut:
                raise MalformedMessage("router snapshot", "it is gone, and half of it would pass for all of it")
            pages.append(page)
            if page.next_cursor is None:
                return pages
            asked = RouterSnapshotRequest(page.cut, page.next_cursor)

    def _book(self, all_booked: Sequence[BookedRequest], ended: set[str]) -> None:
        """What we heard ourselves meanwhile, routes and ends, is newer."""
        now_s = time.monotonic()
        for booked in all_booked:
            key, state = f"{booked.request_id}:{booked.epoch}", self._loads.workers.get(booked.worker)
            if state is not None and key not in ended and key not in state.bookings:
                self._loads.book(key, booked.worker, Booking(booked.num_blocks, booked.num_tokens, now_s - booked.age_s))
