"""The exact block chain: the only authority for reuse.

    block_hash[i] = sha256(block_hash[i-1] ‖ tokens[i])          block_hash[-1] = seed = sha256(model_digest ‖ salt)

A hash therefore names the tokens of its block, all tokens before them, the model with its numerics, and the tenant.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import msgspec

from shared.types import KEY_BYTES, Numerics, pack_tokens

ZERO_SALT = bytes(32)
"""The salt of public prefixes."""


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must agree before two workers may read each other's blocks."""

    architecture: str
    weights_digest: str
    """sha256 of the weights as served (hex)."""
    tokenizer_digest: str
    numerics: Numerics
    dtype: str
    """Of the KV in the device pool."""
    lower_tier_format: str
    """native, int8 or fp8."""
    layout: str
    """KvLayout.digest."""
    block_size: int
    rope: str
    adapter: str = ""

    def digest(self) -> bytes:
        """sha256 over the fields, each tagged with its name and length-prefixed: no two identities share an encoding. [32 bytes]"""
        state = hashlib.sha256(b"slipstream model identity v1")
        for field in msgspec.structs.fields(type(self)):
            for part in (field.name.encode(), str(getattr(self, field.name)).encode()):
                state.update(len(part).to_bytes(4, "little"))
                state.update(part)
        return state.digest()


def tenant_salt(cluster_secret: bytes, tenant: str, cache_salt: str = "") -> bytes:
    """HMAC(cluster secret, tenant ‖ cache_salt), both length-prefixed. The tenant is the authenticated one. [32 bytes]"""
    message = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in (tenant, cache_salt))
    return hmac.digest(cluster_secret, message, "sha256")


def tenant_partition(cluster_secret: bytes, tenant: str) -> str:
    """The tenant as 16 hex digits that do not tell its name."""
    return hmac.digest(cluster_secret, b"partition" + tenant.encode(), "sha256").hex()[:16]


def chain_seed(model_digest: bytes, salt: bytes) -> bytes:
    """The hash before the first block. [32 bytes]"""
    return hashlib.sha256(model_digest + salt).digest()


def block_hashes(
    seed: bytes, packed_tokens: bytes, block_size: int, public: Public | None = None, after: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of the full blocks of `packed_tokens` (little-endian uint32), 32 bytes each.

    `after`: hashes of the leading blocks that are known already; the chain goes on behind them.
    `public`: the chain's declared public prefix, if it has one (see `public_prefix`).
    """
    sha256 = hashlib.sha256
    step = 4 * block_size
    num_blocks = len(packed_tokens) // step
    hashes = list(after[:num_blocks])
    first_private = public.num_blocks if public is not None else 0
    previous = hashes[-1] if hashes else (public.seed if public is not None else seed)
    for index in range(len(hashes), num_blocks):
        tokens = packed_tokens[index * step : (index + 1) * step]
        if public is not None and index == first_private:
            previous = sha256(previous + public.salt + tokens).digest()
        else:
            previous = sha256(previous + tokens).digest()
        hashes.append(previous)
    return hashes


class Public(msgspec.Struct, frozen=True):
    """A chain that begins inside a public prefix: `num_blocks` whole blocks from the zero salt, then `salt` enters once."""

    seed: bytes
    num_blocks: int
    salt: bytes


def public_prefix(
    model_digest: bytes, salt: bytes, packed_tokens: bytes, prefixes: Sequence[Sequence[int]], block_size: int
) -> Public | None:
    """The longest declared prefix that these tokens begin with, in whole blocks; None if there is none."""
    best = 0
    for prefix in prefixes:
        num_blocks = len(prefix) // block_size
        packed = pack_tokens(prefix[: num_blocks * block_size])
        if num_blocks > best and packed_tokens.startswith(packed):
            best = num_blocks
    return Public(chain_seed(model_digest, ZERO_SALT), best, salt) if best else None


def keys(hashes: Sequence[bytes]) -> bytes:
    """32-byte hashes → 16-byte keys, packed."""
    return b"".join(block_hash[:KEY_BYTES] for block_hash in hashes)


def split(packed: bytes, width: int) -> list[bytes]:
    """Packed hashes or keys → a list of `width` bytes each."""
    return [packed[at : at + width] for at in range(0, len(packed), width)]
