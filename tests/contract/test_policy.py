"""One suite for every eviction policy; and the four that others implement too, against libcachesim."""

from __future__ import annotations

import random
from collections.abc import Callable

import libcachesim
import pytest

from loadtest.replay import HitRate, TraceRow, hit_rates, replay_chains, replay_plain
from services.kvstore.policies import POLICIES
from services.kvstore.policies.base import Policy

CAPACITY = 8


@pytest.fixture(params=list(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def policy(name: str) -> Policy[bytes]:
    return POLICIES[name](lambda: CAPACITY)


def key(number: int) -> bytes:
    return number.to_bytes(2, "little")


def test_it_gives_up_each_held_key_once_and_then_says_so(policy: Policy[bytes]) -> None:
    for number in range(CAPACITY):
        policy.admit(key(number))
    assert len(policy) == CAPACITY
    gone = {policy.evict() for _ in range(CAPACITY)}
    assert gone == {key(number) for number in range(CAPACITY)}
    assert len(policy) == 0
    with pytest.raises(KeyError):
        policy.evict()


def test_a_discarded_key_never_comes_back(policy: Policy[bytes]) -> None:
    for number in range(4):
        policy.admit(key(number))
    policy.discard(key(2))
    assert len(policy) == 3
    assert {policy.evict() for _ in range(3)} == {key(0), key(1), key(3)}
    with pytest.raises(KeyError):
        policy.discard(key(2))


def test_a_parked_key_is_the_next_to_go_when_it_is_put_back(policy: Policy[bytes]) -> None:
    for number in range(CAPACITY):
        policy.admit(key(number))
    parked = policy.evict(key(99))
    policy.park(parked)
    assert len(policy) == CAPACITY - 1
    policy.put_back(parked)
    assert len(policy) == CAPACITY
    assert policy.evict(key(99)) == parked


def test_a_parked_key_can_be_used_and_discarded_once_it_is_back(policy: Policy[bytes]) -> None:
    for number in range(3):
        policy.admit(key(number))
    for _ in range(2):
        parked = policy.evict()
        policy.park(parked)
        policy.put_back(parked)
        policy.access(parked)
    policy.discard(parked)
    assert len(policy) == 2


def test_access_to_what_is_not_held_is_a_bug_that_shows(policy: Policy[bytes]) -> None:
    with pytest.raises(KeyError):
        policy.access(key(1))


def test_a_long_random_life_never_loses_or_doubles_a_key(policy: Policy[bytes]) -> None:
    rng = random.Random(7)
    held: set[bytes] = set()
    parked: set[bytes] = set()
    for _ in range(20_000):
        one = key(int(rng.paretovariate(0.6)) % 40)
        if one in held:
            policy.access(one)
        elif one not in parked:
            while len(held) + len(parked) >= CAPACITY and held:
                victim = policy.evict(one)
                assert victim in held
                held.discard(victim)
                if rng.random() < 0.2:
                    policy.park(victim)
                    parked.add(victim)
            if len(held) + len(parked) < CAPACITY:
                policy.admit(one)
                held.add(one)
        if parked and rng.random() < 0.3:
            back = parked.pop()
            policy.put_back(back)
            held.add(back)
        if held and rng.random() < 0.02:
            dropped = min(held)
            policy.discard(dropped)
            held.discard(dropped)
        assert len(policy) == len(held)


@pytest.mark.parametrize("seed", [1, 2])
def test_it_beats_nothing_and_never_infinity(name: str, seed: int) -> None:
    requests = zipf_requests(seed)
    rates = [replay_plain(rows_of(requests), name, capacity) for capacity in (20, 80, 100_000)]
    assert rates == sorted(rates)
    distinct, total = len({block for blocks in requests for block in blocks}), sum(map(len, requests))
    assert rates[-1] == pytest.approx(1 - distinct / total)


def test_what_is_dear_to_compute_again_stays_longer() -> None:
    policy = POLICIES["cost"](lambda: CAPACITY)
    policy.admit(key(0), cost=64.0)
    for number in range(1, CAPACITY):
        policy.admit(key(number), cost=1.0)
    assert [policy.evict() for _ in range(CAPACITY)][-1] == key(0)


def test_but_not_for_ever() -> None:
    policy = POLICIES["cost"](lambda: CAPACITY)
    policy.admit(key(0), cost=8.0)
    gone = []
    for number in range(1, 200):
        policy.admit(key(number), cost=1.0)
        gone.append(policy.evict())
    assert 4 <= gone.index(key(0)) <= 20


def test_a_scan_does_not_flush_what_is_used_again() -> None:
    """The point of s3fifo, lfu and arc; lru and fifo do not have it."""
    survivors: dict[str, int] = {}
    for name, make in POLICIES.items():
        policy = make(lambda: 50)
        held: set[bytes] = set()

        def use(one: bytes, policy: Policy[bytes] = policy, held: set[bytes] = held) -> None:
            if one in held:
                policy.access(one)
                return
            while len(held) >= 50:
                held.discard(policy.evict(one))
            policy.admit(one)
            held.add(one)

        for _ in range(6):
            for number in range(20):
                use(key(number))
        for number in range(1000, 1400):
            use(key(number))
        survivors[name] = len(held & {key(number) for number in range(20)})
    assert survivors["lru"] == survivors["fifo"] == 0
    assert min(survivors[name] for name in ("lfu", "s3fifo", "arc")) >= 18


# -- the outside oracle -------------------------------------------------------------------------------------------------
ORACLES: dict[str, Callable[[int], object]] = {
    "lru": libcachesim.LRU,
    "lfu": libcachesim.LFU,
    "fifo": libcachesim.FIFO,
    "arc": libcachesim.ARC,
    "s3fifo": libcachesim.S3FIFO,
}


def rows_of(requests: list[list[int]]) -> list[TraceRow]:
    return [TraceRow(hash_ids=blocks) for blocks in requests]


def zipf_requests(seed: int) -> list[list[int]]:
    """Chains that share beginnings, as prompts do."""
    rng = random.Random(seed)
    requests = []
    for _ in range(1_500):
        root = int(rng.paretovariate(0.7)) % 300
        requests.append([root * 100 + depth for depth in range(1 + int(rng.paretovariate(0.8)) % 10)])
    return requests


@pytest.mark.parametrize("oracle", list(ORACLES))
@pytest.mark.parametrize("capacity", [50, 200, 400])
def test_hit_rates_equal_libcachesims(oracle: str, capacity: int) -> None:
    requests = zipf_requests(3)
    theirs: object = ORACLES[oracle](capacity)
    num_hits = num_blocks = 0
    for block in (block for blocks in requests for block in blocks):
        request = libcachesim.Request()
        request.obj_id, request.obj_size = block + 1, 1
        num_blocks += 1
        num_hits += theirs.get(request)  # type: ignore[attr-defined]
    assert replay_plain(rows_of(requests), oracle, capacity) == pytest.approx(num_hits / num_blocks, abs=0.002)


def test_replay_gives_a_row_a_policy_and_capacity() -> None:
    rows = hit_rates(rows_of(zipf_requests(4)[:200]), ["lru", "arc"], [10, 100], plain=False)
    assert [(row.policy, row.capacity) for row in rows] == [("lru", 10), ("lru", 100), ("arc", 10), ("arc", 100)]
    assert all(isinstance(row, HitRate) and 0 <= row.hit_rate < 1 for row in rows)


def test_with_room_for_all_the_suffix_rule_costs_nothing(name: str) -> None:
    rows = rows_of(zipf_requests(5))
    assert replay_chains(rows, name, 100_000) == replay_plain(rows, name, 100_000)
