"""The block chain: what differs anywhere before a block differs in its hash, and nothing else does."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from shared.kv.hashing import (
    ZERO_SALT,
    ModelIdentity,
    block_hashes,
    chain_seed,
    keys,
    public_prefix,
    split,
    tenant_partition,
    tenant_salt,
)
from shared.types import pack_tokens

SIZE = 4
TOKENS = list(range(100, 118))
PACKED = pack_tokens(TOKENS)
SEED = chain_seed(b"m" * 32, b"s" * 32)
IDENTITY = ModelIdentity(
    architecture="llama",
    weights_digest="aa",
    tokenizer_digest="bb",
    numerics="default",
    dtype="float32",
    lower_tier_format="native",
    layout="cc",
    block_size=16,
    rope="dd",
)


def test_the_chain_is_the_one_that_the_design_says() -> None:
    assert hashlib.sha256(b"m" * 32 + b"s" * 32).digest() == SEED
    first = hashlib.sha256(SEED + PACKED[:16]).digest()
    second = hashlib.sha256(first + PACKED[16:32]).digest()
    assert block_hashes(SEED, PACKED, SIZE)[:2] == [first, second]
    assert len(block_hashes(SEED, PACKED, SIZE)) == 4, "full blocks only"


@pytest.mark.parametrize("position", range(16))
def test_a_token_changes_its_block_and_all_behind_it(position: int) -> None:
    other = [token + (index == position) for index, token in enumerate(TOKENS)]
    pairs = zip(block_hashes(SEED, PACKED, SIZE), block_hashes(SEED, pack_tokens(other), SIZE), strict=True)
    assert [one == two for one, two in pairs] == [index < position // SIZE for index in range(4)]


@pytest.mark.parametrize("known", range(5))
def test_a_chain_goes_on_from_any_block(known: int) -> None:
    whole = block_hashes(SEED, PACKED, SIZE)
    assert block_hashes(SEED, PACKED, SIZE, after=whole[:known]) == whole
    assert block_hashes(SEED, PACKED[: 4 * 7], SIZE, after=whole[:known]) == whole[:1], "more hashes known than there are blocks"


@pytest.mark.parametrize("field", msgspec.structs.fields(ModelIdentity), ids=lambda field: field.name)
def test_every_field_of_the_identity_counts(field: msgspec.structs.FieldInfo) -> None:
    value = 32 if field.name == "block_size" else "other"
    assert msgspec.structs.replace(IDENTITY, **{field.name: value}).digest() != IDENTITY.digest()
    assert len(IDENTITY.digest()) == 32


def test_no_two_identities_share_an_encoding() -> None:
    moved = msgspec.structs.replace(IDENTITY, weights_digest="a", tokenizer_digest="abb")
    assert moved.digest() != IDENTITY.digest()


def test_tenants_and_salts_never_meet() -> None:
    secret = b"k" * 32
    salts = {tenant_salt(secret, *names) for names in (("a",), ("b",), ("a", "b"), ("ab", ""), ("", "ab"), ("a", "x"))}
    assert len(salts) == 6
    assert tenant_salt(b"o" * 32, "a") not in salts
    assert tenant_salt(secret, "a") == tenant_salt(secret, "a", "")
    assert "tenant" not in tenant_partition(secret, "tenant")
    assert len(tenant_partition(secret, "a")) == 16
    assert tenant_partition(secret, "a") != tenant_partition(secret, "b")


def chain(salt: bytes, tokens: list[int], prefixes: list[list[int]]) -> list[bytes]:
    packed = pack_tokens(tokens)
    public = public_prefix(b"m" * 32, salt, packed, prefixes, SIZE)
    return block_hashes(chain_seed(b"m" * 32, salt), packed, SIZE, public)


def test_a_public_prefix_is_shared_and_what_follows_is_not() -> None:
    one, two = (chain(salt * 32, TOKENS, [TOKENS[:9]]) for salt in (b"s", b"t"))
    assert one[:2] == two[:2] == block_hashes(chain_seed(b"m" * 32, ZERO_SALT), PACKED, SIZE)[:2]
    assert not set(one[2:]) & set(two[2:])
    assert one[2] == hashlib.sha256(one[1] + b"s" * 32 + PACKED[32:48]).digest()


def test_only_a_declared_prefix_in_whole_blocks_is_public() -> None:
    private = chain(b"s" * 32, TOKENS, [])
    assert chain(b"s" * 32, TOKENS, [TOKENS[:3]]) == private, "less than a block"
    assert chain(b"s" * 32, TOKENS, [[1, *TOKENS[1:8]]]) == private, "other tokens"
    assert chain(b"s" * 32, TOKENS[:6], [TOKENS[:8]]) == private[:1], "longer than the prompt"
    longest = chain(b"s" * 32, TOKENS, [TOKENS[:4], TOKENS[:12], TOKENS[:8]])
    assert longest[:3] == block_hashes(chain_seed(b"m" * 32, ZERO_SALT), PACKED, SIZE)[:3]


def test_keys_are_the_first_half_of_each_hash() -> None:
    hashes = block_hashes(SEED, PACKED, SIZE)
    assert split(keys(hashes), 16) == [block_hash[:16] for block_hash in hashes]
    assert split(b"", 16) == []
