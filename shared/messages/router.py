"""What a router tells one that joins it: all that was booked, and what its index holds."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shared.messages.kv import KvSnapshot
from shared.types import Count, InstanceId, RequestId

CutId = Annotated[str, msgspec.Meta(max_length=32)]


class BookedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's share of one worker."""

    request_id: RequestId
    epoch: int
    worker: InstanceId
    num_blocks: Count
    num_tokens: Count
    """Prompt tokens that the worker must compute."""
    age_s: float


class RouterSnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="router_snapshot"):
    """router → router (router.<router>.snapshot): all you know, a page at a time."""

    cut: CutId = ""
    """Of the first page's answer; "": take a new one."""
    cursor: Count = 0


class RouterSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="router_snapshot_page"):
    """One page of what was known at one moment. A source's pages follow one another; only EXACT sources are told."""

    cut: CutId
    """"": there is no such cut any more."""
    booked: list[BookedRequest]
    sources: list[KvSnapshot]
    next_cursor: Count | None = None
    """None: this was the last page."""
