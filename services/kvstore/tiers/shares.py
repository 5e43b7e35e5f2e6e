"""Whose blocks a tier holds, and who has most of them. Plain integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.kvstore.policies.base import Capacity, Policy

MakePolicy = Callable[[Capacity], Policy[bytes]]
ShareKey = tuple[str, bytes, str]
"""(layout, model_digest, tenant)"""


class Share:
    """The blocks of one layout, model and tenant in a tier: evicted among themselves when the share is too big."""

    def __init__(self, key: ShareKey, policy: Policy[bytes]) -> None:
        self.key = key
        self.policy = policy
        self.num_blocks = 0
        """Parked ones included, which the policy does not hold."""


class _BySize:
    """The shares of one layout. Sizes change by one, so that the biggest is known without looking for it."""

    def __init__(self) -> None:
        self._of_size: dict[int, dict[ShareKey, Share]] = {}
        self._largest = 0
        self.num = 0

    def resize(self, share: Share, by: int) -> None:
        """`by` is 1 or -1."""
        if share.num_blocks:
            self._leave(share)
        share.num_blocks = size = share.num_blocks + by
        if size:
            self._of_size.setdefault(size, {})[share.key] = share
            self.num += 1
        if size > self._largest or self._largest not in self._of_size:
            self._largest = size

    def _leave(self, share: Share) -> None:
        peers = self._of_size[share.num_blocks]
        del peers[share.key]
        if not peers:
            del self._of_size[share.num_blocks]
        self.num -= 1

    def biggest_first(self) -> Iterator[Share]:
        """The first costs nothing to find; who needs more than it pays for an order of all."""
        if not self.num:
            return
        yield (first := next(iter(self._of_size[self._largest].values())))
        for size in sorted(self._of_size, reverse=True):
            yield from [share for share in self._of_size[size].values() if share is not first]


class Shares:
    """Every operation is O(1) however many tenants there are."""

    def __init__(self) -> None:
        self._shares: dict[ShareKey, Share] = {}
        self._by_size: dict[str, _BySize] = {}

    def __iter__(self) -> Iterator[Share]:
        return iter(self._shares.values())

    def get(self, key: ShareKey) -> Share | None:
        return self._shares.get(key)

    def grow(self, key: ShareKey, make_policy: Callable[[], Policy[bytes]]) -> Share:
        """One block more; the share is made with its first."""
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = Share(key, make_policy())
        self._by_size.setdefault(key[0], _BySize()).resize(share, 1)
        return share

    def shrink(self, share: Share) -> None:
        """One block less; without any it is forgotten."""
        layout = share.key[0]
        self._by_size[layout].resize(share, -1)
        if not share.num_blocks:
            del self._shares[share.key]
        if not self._by_size[layout].num:
            del self._by_size[layout]

    def num_of(self, layout: str) -> int:
        """Shares that have blocks of the layout."""
        return self._by_size[layout].num if layout in self._by_size else 0

    def biggest_first(self, layout: str) -> Iterator[Share]:
        """Those of the layout."""
        return self._by_size[layout].biggest_first() if layout in self._by_size else iter(())
