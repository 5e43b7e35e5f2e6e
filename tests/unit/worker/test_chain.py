"""A worker's chain is the gateway's chain, however it grows."""

from __future__ import annotations

from shared.kv.hashing import block_hashes, chain_seed
from shared.types import pack_tokens
from shared.worker.chain import Chain
from tests.support.fake_delivery import make_request

TOKENS = list(range(500, 547))


def test_extending_token_by_token_is_hashing_at_once() -> None:
    chain = Chain(b"m" * 32, make_request(0, TOKENS[:5]), 4, ())
    for count in range(6, len(TOKENS) + 1):
        chain.extend(TOKENS[:count])
    assert chain.hashes == block_hashes(chain_seed(b"m" * 32, bytes(32)), pack_tokens(TOKENS), 4)
    assert chain.parent(0) == chain.seed
    assert chain.parent(3) == chain.hashes[2]


def test_models_and_salts_have_their_own_chains() -> None:
    request = make_request(0, TOKENS)
    seeds = {
        Chain(b"m" * 32, request, 4, ()).hashes[0],
        Chain(b"n" * 32, request, 4, ()).hashes[0],
        Chain(b"m" * 32, make_request(0, TOKENS, salt=b"s" * 32), 4, ()).hashes[0],
    }
    assert len(seeds) == 3


def test_a_public_prefix_is_shared_and_what_follows_is_not() -> None:
    prefixes = [TOKENS[:9]]
    chains = [Chain(b"m" * 32, make_request(0, TOKENS, salt=salt * 32), 4, prefixes) for salt in (b"s", b"t")]
    assert chains[0].hashes[:2] == chains[1].hashes[:2]
    assert not set(chains[0].hashes[2:]) & set(chains[1].hashes[2:])
