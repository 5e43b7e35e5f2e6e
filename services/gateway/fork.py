"""What stands where a prompt begins to differ from the earlier ones: its kind, never its text. Pure but for what it remembers.

The router knows that a prompt left the known path; only here is there a tokenizer to see what it stumbled over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec

from services.gateway.difference import Kind, differs_in_blanks, differs_in_order, kind_of
from shared.kv.hashing import split
from shared.messages.request import GenerateRequest
from shared.types import KEY_BYTES, unpack_tokens

Place = Literal["beginning", "later"]

MAX_KEYS = 2**17
"""Blocks remembered, the newest: two million tokens at 16 a block, some 40 MB."""
MAX_BLOCKS = 2**11
"""Looked at of one prompt, the first: what a long one costs is bounded."""
_SALT_BYTES = 8
_TOKEN_BYTES = 4
_LEAD_TOKENS = 8
"""Looked at before the block that differs: a date may begin in the block before."""
_BEGINNING_TOKENS = 48
_NEAR_TOKENS = 64
"""Compared with the earlier prompt from there on."""
_FAR_TOKENS = 512
"""The same, before and behind it, where JSON stands: a tool's description is long."""

Decode = Callable[[Sequence[int]], str]


class Fork(NamedTuple):
    """`num_tokens` of the prompt stand behind it, and cannot be reused because of it."""

    place: Place
    kind: Kind
    num_tokens: int


class _Block(msgspec.Struct, gc=False):
    """Of an earlier prompt."""

    packed: bytes
    """Its tokens; none for the root, which is before the first block."""
    follower: bytes = b""
    """Key of the block that followed it last; empty if none has."""


class Forks:
    """Remembers the blocks of this gateway's prompts, by keys that are salted with their tenant and model.

    Whatever the prompts: a millisecond at most, and at most five calls of `decode` with at most 2 * _FAR_TOKENS each.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys // 2
        self._new: dict[bytes, _Block] = {}
        self._old: dict[bytes, _Block] = {}
        """The older half."""

    def see(self, request: GenerateRequest, block_size: int, decode: Decode) -> Fork | None:
        """Where a prompt leaves the others of its tenant. None: it does not; it goes on where one ended; there are no others."""
        tenant = request.salt[:_SALT_BYTES]  # public blocks are everybody's, what follows them is not
        block_keys = split(request.block_keys[: MAX_BLOCKS * KEY_BYTES], KEY_BYTES)
        keys = [tenant + request.model.encode(), *[tenant + key for key in block_keys]]
        num_known = next((at for at, key in enumerate(keys) if self._block(key) is None), len(keys))
        parent = self._block(keys[num_known - 1]) if 0 < num_known < len(keys) else None
        fork = None
        if parent is not None and parent.follower:
            at = (num_known - 1) * block_size
            kind = self._kind(request.token_ids, at, block_size, self._path(parent), decode)
            fork = Fork("later" if at else "beginning", kind, request.num_tokens - at)
        self._remember(keys, request.token_ids, _TOKEN_BYTES * block_size)
        return fork

    def _kind(self, packed: bytes, at: int, block_size: int, earlier: Sequence[int], decode: Decode) -> Kind:
        """Of what stands at token `at`, from where on there once followed the tokens `earlier`."""

        def ours(begin: int, end: int) -> list[int]:
            return unpack_tokens(packed[max(begin, 0) * _TOKEN_BYTES : end * _TOKEN_BYTES])

        def both(before: int, behind: int) -> tuple[str, str]:
            """A character that is cut off at the end is no difference."""
            common, behind = ours(at - before, at), min(behind, len(earlier))
            one, other = decode([*common, *ours(at, at + behind)]), decode([*common, *earlier[:behind]])
            return one.rstrip("\ufffd"), other.rstrip("\ufffd")

        if differs_in_blanks(*both(_LEAD_TOKENS, _NEAR_TOKENS)):
            return "whitespace"
        near = decode(ours(at - _LEAD_TOKENS, at + block_size) if at else ours(0, _BEGINNING_TOKENS))
        if '"' in near and differs_in_order(*both(_FAR_TOKENS, _FAR_TOKENS)):
            return "order"
        return kind_of(near)

    def _path(self, block: _Block) -> list[int]:
        """At most _FAR_TOKENS that once followed a block, and maybe some more."""
        packed: list[bytes] = []
        num_bytes = 0
        while num_bytes < _TOKEN_BYTES * _FAR_TOKENS and (follower := self._block(block.follower)) is not None:
            block = follower
            packed.append(block.packed)
            num_bytes += len(block.packed)
        return unpack_tokens(b"".join(packed))

    def _block(self, key: bytes) -> _Block | None:
        return self._new.get(key) or self._old.get(key)

    def _remember(self, keys: Sequence[bytes], packed: bytes, block_bytes: int) -> None:
        if len(self._new) + len(keys) > self._max_keys:
            self._old, self._new = self._new, {}
        for number, key in enumerate(keys):
            begins = (number - 1) * block_bytes
            block = self._block(key) or _Block(packed[begins : begins + block_bytes] if number else b"")
            block.follower = keys[number + 1] if number + 1 < len(keys) else block.follower
            self._new[key] = block
