"""The KV store's protocol and its events. Control only: block bytes go through the arena or the socket between hosts."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.types import KEY_BYTES, Count, HostId, InstanceId, Tier

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Digests = Annotated[bytes, msgspec.Meta(max_length=32 * 2**15)]
"""Full 32-byte block hashes, one after the other."""
Keys = Annotated[bytes, msgspec.Meta(max_length=16 * 2**15)]
"""16-byte block keys, one after the other."""

Serial = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that is never given twice: a slot's generation, a lease's id."""


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One slot of the arena. `generation` changes each time the slot is given to somebody else."""

    offset: Count
    """Byte offset of the slot's header in the arena file; the payload follows the header."""
    generation: Serial
    present: bool = False
    """reserve only: the block is stored already; there is nothing to write and no slot (offset and generation 0)."""


class KvLookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """worker, router or console → kvstore. A probe: renews nothing, leases nothing."""

    model_digest: Digest
    block_hashes: Digests


class KvLookupReply(msgspec.Struct, frozen=True, array_like=True, tag="lookup_reply"):
    """Leading blocks held, and in which tier each lies."""

    num_blocks: Count
    tiers: list[Tier]


class KvReserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """worker → its host's kvstore: room for blocks that are computed already. Key: (worker, block_hashes)."""

    worker: InstanceId
    model_digest: Digest
    layout: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    """KvLayout.digest: names the size class."""
    block_bytes: Count
    parents: Digests
    """The hash before each block (the chain's seed before a first one): blocks of several chains may share a reservation."""
    block_hashes: Digests
    tenants: list[Annotated[str, msgspec.Meta(max_length=16)]] = []
    """The partition of each block's request, for quotas; one entry stands for all."""
    handoff: bool = False
    """Give a lease even if every block is present: a commit with a handoff host will follow."""
    number: Count = 0
    """Of this reservation, counted by the worker from 1 on."""
    finished_below: Count = 0
    """The worker writes no more under its reservations with lower numbers, answered or not: their slots are free if they had expired."""


class KvReserveReply(msgspec.Struct, frozen=True, array_like=True, tag="reserve_reply"):
    """`slots` has one entry a block, in order; it may be shorter than asked if there is no room for the rest (`reason` says why)."""

    lease_id: Serial
    slots: list[Slot]
    ttl_s: float = 0.0
    reason: str = ""


class KvCommit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """worker → its host's kvstore: the slots of the lease are written, headers and checksums included. Key: lease_id."""

    worker: InstanceId
    lease_id: Serial
    handoff_host: HostId | None = None
    """Set for a handoff: pin the blocks until acquired or 10 s; if it is another host, push them there."""
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] = ""


class KvCommitReply(msgspec.Struct, frozen=True, array_like=True, tag="commit_reply"):
    """How many of the lease's blocks can be found from now on."""

    num_blocks: Count


class KvAcquire(msgspec.Struct, frozen=True, array_like=True, tag="acquire"):
    """worker → its host's kvstore: hold the longest leading run of these blocks while I copy them."""

    worker: InstanceId
    model_digest: Digest
    layout: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    block_hashes: Digests
    wait_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 0.0
    """Wait at most so long for blocks that are under way from another host or tier."""
    traceparent: Annotated[str, msgspec.Meta(max_length=64)] = ""
    block_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """What computing one of these blocks takes the worker, as it measured; 0: unknown. A slower tier is then not loaded from."""


class KvAcquireReply(msgspec.Struct, frozen=True, array_like=True, tag="acquire_reply"):
    """`slots` is the leading run (maybe empty); `tiers` says where each lay when asked; `reason` names why the run ended."""

    lease_id: Serial
    slots: list[Slot]
    tiers: list[Tier]
    reason: str = ""


class KvRelease(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """worker → its host's kvstore: end of a lease of either kind; uncommitted slots become free. Idempotent."""

    worker: InstanceId
    lease_id: Serial
    bad_hashes: Digests = b""
    """Blocks whose copy failed its check: they and their descendants are dropped."""


class KvReleaseReply(msgspec.Struct, frozen=True, array_like=True, tag="release_reply"):
    """Blocks dropped because their copies failed."""

    num_dropped: Count = 0


class KvPrefetch(msgspec.Struct, frozen=True, array_like=True, tag="prefetch"):
    """router → kvstore of the chosen host, core: these blocks will be wanted soon. Best effort."""

    model_digest: Digest
    block_keys: Keys
    sources: list[HostId] = []
    """Hosts that hold what this one lacks, best first."""
    under_way: bool = False
    """kvstore → kvstore, before a push: the first source sends them already; an acquire may wait for them."""


class KvSnapshotRequest(msgspec.Struct, frozen=True, array_like=True, tag="kv_snapshot"):
    """router → event source (kv.<host>.snapshot or worker.<worker>.snapshot): all you hold, a page at a time."""

    cursor: Count = 0


class KvSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="kv_snapshot_page"):
    """One page. Valid together with the events of the same epoch after `sequence` (the sequence when the first page was cut)."""

    source: InstanceId
    epoch: Serial
    sequence: Count
    entries: list[BlocksStored]
    next_cursor: Count | None = None
    """None: this was the last page."""


class BlocksStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """Blocks of one chain, consecutive, now held in `tier`."""

    tier: Tier
    parent: Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]
    """Key before the first (cut to 16 bytes)."""
    block_keys: Keys


class BlocksRemoved(msgspec.Struct, frozen=True, array_like=True, tag="removed"):
    """Blocks no longer held in `tier`."""

    tier: Tier
    block_keys: Keys


class BlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag="cleared"):
    """Everything is gone."""


KvEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KvEventBatch(msgspec.Struct, frozen=True, array_like=True, tag="kv_events"):
    """kvstore or worker → routers, core. `sequence` goes up by one a batch within an epoch; a gap or a new epoch: fetch a snapshot."""

    source: InstanceId
    """A worker (tier device) or a host id (tiers dram, ssd)."""
    source_kind: Literal["worker", "host"]
    model: str
    """ModelId, or "" if the batch concerns all."""
    epoch: Serial
    sequence: Count
    events: list[KvEvent]


class KvError(msgspec.Struct, frozen=True, array_like=True, tag="kv_error"):
    """kvstore → caller: the request was refused; the store is unharmed."""

    code: str
    message: str


# -- between stores: frames on the socket of SS_KV_BIND ---------------------------------------------------------------
Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Proof = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class PeerChallenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """listener → caller, first frame."""

    host: HostId
    nonce: Nonce


class PeerProof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    """caller → listener: HMAC(cluster secret, "caller" ‖ both nonces ‖ both hosts)."""

    host: HostId
    nonce: Nonce
    proof: Proof


class PeerWelcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """listener → caller: the same with "listener". A wrong proof gets a closed connection instead."""

    proof: Proof


class BlockOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """sender → receiver: blocks of one model and layout that I can send you now."""

    model_digest: Digest
    layout: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
    block_bytes: Count
    block_hashes: Digests
    parents: Digests
    tenants: list[Annotated[str, msgspec.Meta(max_length=16)]]
    """One a block."""
    handoff: bool = False
    """Pin them until acquired or 10 s."""


class BlocksWanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted_blocks"):
    """receiver → sender: send these of the offer, in this order."""

    indexes: Annotated[list[int], msgspec.Meta(max_length=2**15)]


class BlockHead(msgspec.Struct, frozen=True, array_like=True, tag="head"):
    """sender → receiver, before `length` raw bytes of payload."""

    index: Count
    format: Annotated[str, msgspec.Meta(max_length=8)]
    length: Count
    checksum: int
    token_ids: Annotated[bytes, msgspec.Meta(max_length=2048)]


class BlocksTaken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """receiver → sender: how many arrived whole."""

    num_blocks: Count


class BlockPull(msgspec.Struct, frozen=True, array_like=True, tag="pull"):
    """caller → listener: send me these if you hold them; the listener answers with a BlockOffer (maybe empty) and becomes the sender."""

    model_digest: Digest
    block_keys: Keys


PeerMessage = BlockOffer | BlockPull
"""What a caller may begin with, once welcome."""
