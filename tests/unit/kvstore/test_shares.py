"""The biggest share is always known, whatever grew and shrank; against a plain sort."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.policies.lru import Lru
from services.kvstore.tiers.shares import ShareKey, Shares


def key(layout: str, tenant: int) -> ShareKey:
    return layout, b"model", str(tenant)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("ab"), st.integers(0, 5)), max_size=200))
def test_order_and_number_are_those_of_a_plain_count(steps: list[tuple[bool, str, int]]) -> None:
    shares, counts = Shares(), dict[ShareKey, int]()
    for grows, layout, tenant in steps:
        name = key(layout, tenant)
        share = shares.get(name)
        if grows:
            shares.grow(name, lambda: Lru(lambda: 1))
            counts[name] = counts.get(name, 0) + 1
        elif share is not None:
            shares.shrink(share)
            counts[name] -= 1
            if not counts[name]:
                del counts[name]
        assert {one.key: one.num_blocks for one in shares} == counts
        for which in "ab":
            sizes = [count for name, count in counts.items() if name[0] == which]
            assert shares.num_of(which) == len(sizes)
            in_order = list(shares.biggest_first(which))
            assert [one.num_blocks for one in in_order] == sorted(sizes, reverse=True)
            assert len({one.key for one in in_order}) == len(sizes)
