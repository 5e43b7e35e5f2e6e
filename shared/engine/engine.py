"""The engine's contract. TorchEngine (model/) and SimulatedEngine (simulated.py) pass the same suite (tests/contract/test_engine.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import msgspec

from shared.engine.batch import Batch
from shared.kv.layout import KvLayout, LowerFormat
from shared.types import Numerics, TokenLogprob

ReportProgress = Callable[[str, float | None], None]
"""(what is being done, fraction done or None)."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves."""

    model_name: str
    model_path: str
    """Folder with tokenizer.json and tokenizer_config.json."""
    model_digest: bytes
    """ModelIdentity.digest(), 32 bytes."""
    layout: KvLayout
    num_blocks: int
    """Blocks of the device pool."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    numerics: Numerics
    device: str
    """cpu, cuda or sim."""
    dtype: str
    weight_format: str
    lower_format: LowerFormat = "native"
    """How the lower tiers keep its blocks; part of the model digest."""
    commits_blocks: bool
    """Whether the weight format is admitted to the numerics class: only then blocks may be given to others."""


class Sampled(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One sampled token."""

    token_id: int
    logprob: TokenLogprob | None = None


class Engine(ABC):
    """A model with a paged KV pool. Not thread-safe but for export_blocks and import_blocks, which may run beside `forward` on blocks
    that `forward` does not use. Every method blocks: services call them from a thread."""

    spec: EngineSpec

    @abstractmethod
    def forward(self, batch: Batch) -> list[Sampled]:
        """Compute the items' tokens into the pool; returns one Sampled for each item with `sample`, in order.

        Does not change the sequences: the scheduler commits. Raises EngineError; the pool's other blocks are then unharmed.
        """

    @abstractmethod
    def export_blocks(self, block_ids: ListLike[int], out: ListLike[memoryview]) -> None:
        """Copy blocks into buffers of `spec.layout.block_bytes` bytes each."""

    @abstractmethod
    def import_blocks(self, block_ids: ListLike[int], data: ListLike[memoryview]) -> None:
        """Copy buffers of `spec.layout.block_bytes` bytes each into blocks."""

    @abstractmethod
    def host_block(self, block_id: int) -> memoryview | None:
        """A block itself, `spec.layout.block_bytes` writable bytes; None if it does not lie in this process' memory."""

    @abstractmethod
    def warm_up(self, report: ReportProgress) -> None:
        """Touch the pool and run the first steps, so that the first request is not slower than the next."""

    def close(self) -> None:  # noqa: B027 - nothing to close is fine
        """Free device memory. Idempotent."""
