"""The block chain of one request, as a worker hashes it."""

from __future__ import annotations

from collections.abc import Sequence

from shared.kv.hashing import block_hashes, chain_seed, public_prefix
from shared.messages.request import GenerateRequest
from shared.types import pack_tokens


class Chain:
    """Hashes of a sequence's full blocks, extended as tokens come. `hashes` has 32 bytes each."""

    def __init__(self, model_digest: bytes, request: GenerateRequest, block_size: int, public_prefixes: Sequence[Sequence[int]]) -> None:
        self._block_size = block_size
        self._public = public_prefix(model_digest, request.salt, request.token_ids, public_prefixes, block_size)
        self.seed = self._public.seed if self._public is not None else chain_seed(model_digest, request.salt)
        self.hashes = block_hashes(self.seed, request.token_ids, block_size, self._public)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hash the full blocks of `token_ids` (the whole sequence) that are not hashed yet."""
        known = len(self.hashes)
        while (known + 1) * self._block_size <= len(token_ids):
            end = (known + 1) * self._block_size
            padding = bytes(4 * known * self._block_size)
            packed = padding + pack_tokens(token_ids[known * self._block_size : end])
            self.hashes = block_hashes(self.seed, packed, self._block_size, self._public, after=self.hashes)
            known += 1

    def parent(self, index: int) -> bytes:
        """The hash before block `index`."""
        return self.hashes[index - 1] if index else self.seed
