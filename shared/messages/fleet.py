"""Who is there, what they serve, how loaded they are, what the planner wants."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.types import Count, HostId, InstanceId, ModelId, Numerics, RequestId, Role


class WorkerLease(msgspec.Struct, frozen=True, array_like=True, tag="lease"):
    """Every process's entry in bucket ss_workers (key `<role>.<instance>`), renewed each second, TTL 3 s."""

    instance: InstanceId
    role: Role
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}\Z")]
    """What people call it: decode-0."""
    state: Literal["starting", "ready", "draining"]
    sequence: Count
    """Goes up with every renewal."""
    version: str
    started_at_ns: int
    """Wall clock, for people."""
    host: HostId | None = None
    """The arena it maps; None: no store on this host."""
    model: ModelId | None = None
    device: str = ""
    max_num_seqs: Count = 0
    """Slots of a decode worker."""
    num_blocks: Count = 0
    """Blocks of the device pool."""
    block_size: Count = 0
    prefill_budget: Count = 0
    """Prompt tokens a decode step computes at most (decode), or tokens a chunk has at first (prefill)."""
    kv_address: str = ""
    """host:port of a kvstore's socket for pushes between hosts."""
    metrics_address: str = ""
    """host:port of its /metrics."""
    http_address: str = ""
    """host:port of a gateway."""
    pid: Count = 0


class ModelCard(msgspec.Struct, frozen=True, array_like=True, tag="card"):
    """One model with one numerics class, in bucket ss_config (key `model.<model>`), written by the workers that serve it."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}\Z")]
    model_digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    path: str
    """Folder with tokenizer.json and tokenizer_config.json on the worker's machine; a gateway may be configured with its own."""
    block_size: Count
    max_model_len: Count
    vocab_size: Count
    eos_token_ids: list[int]
    numerics: Numerics
    dtype: str
    layout: str
    block_bytes: Count
    public_prefixes: list[list[int]] = []
    """Token lists whose whole blocks may be shared between tenants."""

    @property
    def model(self) -> str:
        return self.model_digest.hex()[:16]


class EndedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that a worker no longer holds."""

    request_id: RequestId
    epoch: int


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """worker → routers and planner, core, twice a second. Corrects what routers booked."""

    worker: InstanceId
    role: Literal["prefill", "decode"]
    model: ModelId
    sequence: Count
    num_running: Count
    num_waiting: Count
    num_queued_tokens: Count
    """Prompt tokens taken and still to compute."""
    num_blocks: Count
    num_used_blocks: Count
    """Blocks held by running and waiting sequences (cached but free ones do not count)."""
    step_ms: float = 0.0
    """EWMA of a decode step, or of a prefill chunk."""
    prefill_tokens_per_s: float = 0.0
    """EWMA, 0 while unknown."""
    load_bytes_per_s: float = 0.0
    """EWMA of acquire → blocks in the pool."""
    utilisation: float = 0.0
    ended: list[EndedRequest] = []
    """Requests ended since the last WorkerLoad."""


class DrainReply(msgspec.Struct, frozen=True, array_like=True, tag="drain_reply"):
    """worker → whoever asked on worker.<worker>.drain (planner, console; the request is empty): it takes no more, finishes, and ends."""

    num_held: Count
    """Requests that it holds now."""


class Route(msgspec.Struct, frozen=True, array_like=True, tag="route"):
    """router → routers and planner, core: what was decided; other routers book the same load."""

    router: InstanceId
    sequence: Count
    request_id: RequestId
    epoch: int
    model: ModelId
    decode_worker: InstanceId
    prefill_worker: InstanceId | None
    num_tokens: Count
    num_uncached_tokens: Count
    num_blocks: Count
    """Blocks booked at the decode worker."""
    num_overlap_blocks: Count = 0
    partition: str = ""
    sketch_version: Count = 0
    sketches: list[int] = []
    """64-bit SimHashes of the qualifying spans."""
    block_keys: bytes = b""


class UsageRecord(msgspec.Struct, frozen=True, array_like=True, tag="usage"):
    """gateway → stream SS_USAGE, one a request, for the ledger. No text."""

    request_id: RequestId
    tenant: str
    model: str
    door: Literal["http", "nats"]
    outcome: str
    """A finish reason or an error code."""
    num_prompt_tokens: Count
    num_output_tokens: Count
    num_cached_tokens: Count
    num_migrations: Count
    ttft_ms: float
    e2e_ms: float
    started_at_ns: int
    gateway: InstanceId
    decode_worker: InstanceId | None = None
    prefill_worker: InstanceId | None = None


class Plan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """planner → everybody, core and bucket ss_config (key `plan`)."""

    sequence: Count
    num_prefill: Count
    num_decode: Count
    max_num_seqs: Count
    reason: str
    observed: dict[str, float] = {}
    """What the plan is based on: rates, latencies, utilisation."""
