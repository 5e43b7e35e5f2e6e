"""Every eviction policy, one suite; and each against an outside implementation."""

from __future__ import annotations

import random
from collections.abc import Callable

import libcachesim
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.policies import POLICIES
from services.kvstore.policies.base import Policy

CAPACITY = 100


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make(name: str, capacity: int = CAPACITY) -> Policy[bytes]:
    return POLICIES[name](lambda: capacity)


@pytest.fixture(params=sorted(POLICIES))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_has_its_name(name: str) -> None:
    assert make(name).name == name


def test_gives_up_each_held_key_once(name: str) -> None:
    policy = make(name)
    for number in range(CAPACITY):
        policy.admit(key_of(number))
    for number in range(0, CAPACITY, 3):
        policy.access(key_of(number))
    assert len(policy) == CAPACITY
    assert sorted(policy.evict() for _ in range(CAPACITY)) == [key_of(number) for number in range(CAPACITY)]
    assert len(policy) == 0


def test_nothing_held_is_a_key_error(name: str) -> None:
    with pytest.raises(KeyError):
        make(name).evict()
    with pytest.raises(KeyError):
        make(name).evict(key_of(1))


def test_what_is_put_back_goes_next(name: str) -> None:
    policy = make(name)
    for number in range(20):
        policy.admit(key_of(number))
        policy.access(key_of(number))
    stuck = policy.evict()
    policy.put_back(stuck)
    assert len(policy) == 20
    assert policy.evict() == stuck


def test_what_is_put_back_can_be_used_again(name: str) -> None:
    policy = make(name)
    for number in range(20):
        policy.admit(key_of(number))
    stuck = policy.evict()
    policy.put_back(stuck)
    policy.access(stuck)
    assert sorted(policy.evict() for _ in range(20)) == [key_of(number) for number in range(20)]


def test_a_discarded_key_is_forgotten(name: str) -> None:
    policy = make(name)
    for number in range(10):
        policy.admit(key_of(number))
    policy.discard(key_of(3))
    with pytest.raises(KeyError):
        policy.discard(key_of(3))
    assert key_of(3) not in [policy.evict() for _ in range(9)]


@given(
    st.lists(st.tuples(st.sampled_from(["use", "use", "use", "discard", "stuck"]), st.integers(0, 40)), max_size=300), st.integers(1, 12)
)
def test_holds_exactly_what_it_was_given(steps: list[tuple[str, int]], capacity: int) -> None:
    for name in POLICIES:
        policy = make(name, capacity)
        held: set[bytes] = set()
        for verb, number in steps:
            key = key_of(number)
            if verb == "use":
                if key in held:
                    policy.access(key)
                    continue
                while len(held) >= capacity:
                    held.remove(policy.evict(key))
                policy.admit(key)
                held.add(key)
            elif verb == "discard" and key in held:
                policy.discard(key)
                held.remove(key)
            elif verb == "stuck" and held:
                stuck = policy.evict(key)
                policy.put_back(stuck)
            assert len(policy) == len(held)
        assert {policy.evict() for _ in range(len(held))} == held


def hit_rate(policy: Policy[bytes], capacity: int, accesses: list[int]) -> float:
    held: set[bytes] = set()
    num_hits = 0
    for number in accesses:
        key = key_of(number)
        if key in held:
            num_hits += 1
            policy.access(key)
            continue
        if len(held) == capacity:
            held.remove(policy.evict(key))
        policy.admit(key)
        held.add(key)
    return num_hits / len(accesses)


def oracle_hit_rate(make_cache: Callable[[int], object], capacity: int, accesses: list[int]) -> float:
    cache = make_cache(capacity)
    request = libcachesim.Request()
    num_hits = 0
    for number in accesses:
        request.obj_id = number
        request.obj_size = 1
        num_hits += cache.get(request)  # type: ignore[attr-defined]
    return num_hits / len(accesses)


ORACLES = {
    "lru": libcachesim.LRU,
    "fifo": libcachesim.FIFO,
    "lfu": libcachesim.LFU,
    "arc": libcachesim.ARC,
    "s3fifo": libcachesim.S3FIFO,
}


@pytest.mark.parametrize("policy", sorted(ORACLES))
@pytest.mark.parametrize("capacity", [50, 400])
def test_agrees_with_an_outside_implementation(policy: str, capacity: int) -> None:
    generator = random.Random(7)
    accesses = [int(generator.paretovariate(0.6)) % 3000 for _ in range(30_000)]
    accesses += [number for start in range(0, 900, 300) for number in range(5000 + start, 5000 + start + 600)]
    ours = hit_rate(make(policy, capacity), capacity, accesses)
    theirs = oracle_hit_rate(ORACLES[policy], capacity, accesses)
    assert ours == pytest.approx(theirs, abs=0.004), (ours, theirs)


def test_cost_keeps_what_is_dear_but_not_for_ever() -> None:
    policy = make("cost")
    policy.admit(key_of(1), 10.0)
    for number in range(2, 6):
        policy.admit(key_of(number), 1.0)
    assert [policy.evict() for _ in range(4)] == [key_of(number) for number in range(2, 6)]
    gone = []
    for number in range(6, 30):
        policy.admit(key_of(number), 1.0)
        gone.append(policy.evict())
    assert 5 <= gone.index(key_of(1)) <= 12
