"""A request as the engine and the schedulers see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.types import SamplingParams


@dataclass(slots=True)
class Sequence:
    """Tokens, the blocks that hold their KV, and how far the KV is computed.

    `token_ids` is prompt ‖ output; KV of positions [0, num_computed_tokens) lies in `block_table` (position p in block p // block_size).
    """

    key: str
    """`request_id:epoch`."""
    token_ids: list[int]
    num_prompt_tokens: int
    """Tokens of the original prompt: penalties, min_tokens and indexes count output from here, also after a migration."""
    sampling: SamplingParams
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks, as far as they are known. 32 bytes each."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens, those of earlier epochs included: the index of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens
