"""What every tier below the arena promises: exact bytes or a miss, quotas, suffix before parent, nothing lost at a restart."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.kvstore.policies import POLICIES
from services.kvstore.tiers.base import LowerTier, Quota
from shared.errors import KvError
from shared.kv import slot
from tests.support.kvssd import Ssd
from tests.support.kvstore import LAYOUT, Chain, Store

MakeSsd = Callable[..., Ssd]


@pytest.fixture
def store() -> Iterator[Store]:
    directory = Path(tempfile.mkdtemp(prefix="ss-test-kv-", dir="/dev/shm"))
    made = Store(directory, num_bytes=4 * 2**20)
    yield made
    made.close()
    shutil.rmtree(directory)


@pytest.fixture(params=["ssd", "ssd on tmpfs"])
def make(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> Iterator[MakeSsd]:
    """Each tier, by a function that opens it (again)."""
    folder = tmp_path / "tier" if request.param == "ssd" else store.directory / "tier"
    made: list[Ssd] = []

    def open_tier(**settings: Any) -> Ssd:
        made.append(Ssd(folder, store, **settings))
        return made[-1]

    yield open_tier
    for tier in made:
        tier.tier.check_integrity()
        tier.disk.going_on.set()
        tier.tier.close()


async def test_what_was_saved_is_loaded_byte_for_byte(make: MakeSsd) -> None:
    tier, chain = make(), Chain(6)
    assert isinstance(tier.tier, LowerTier)
    assert await tier.put(chain) == 6
    assert await tier.num_readable(chain) == 6
    assert tier.tier.estimate_s(2**20) > 0


async def test_a_block_that_is_there_is_not_saved_again(make: MakeSsd) -> None:
    tier, chain = make(), Chain(3)
    assert await tier.put(chain) == 3
    assert await tier.put(chain) == 0


async def test_a_restart_keeps_its_blocks_even_after_a_kill(make: MakeSsd) -> None:
    tier, chain = make(), Chain(6)
    await tier.put(chain)
    tier.kill()
    again = make()
    assert len(again.tier.index) == 6
    assert await again.num_readable(chain) == 6
    again.tier.close()
    assert await make().num_readable(chain) == 6


async def test_dropped_and_evicted_blocks_stay_gone_after_a_restart(make: MakeSsd) -> None:
    tier, kept, dropped = make(), Chain(2), Chain(4, first_token=500)
    await tier.put(kept)
    await tier.put(dropped)
    block = tier.block(dropped, 1)
    assert block is not None and tier.tier.drop(block) == 3
    await tier.tier.settle()
    tier.kill()
    again = make()
    assert len(again.tier.index) == 3
    assert await again.num_readable(kept) == 2


async def test_many_more_blocks_than_room(make: MakeSsd) -> None:
    tier = make()
    chains = [Chain(8, first_token=1000 * number) for number in range(40)]
    for chain in chains:
        await tier.put(chain)
    room = tier.tier.segments.num_bytes // slot.slot_bytes(LAYOUT.block_bytes)
    assert len(tier.tier.index) <= room
    readable = [await tier.num_readable(chain) for chain in chains]
    assert sum(readable) == len(tier.tier.index) and readable[-1] == 8
    tier.kill()
    again = make()
    assert [await again.num_readable(chain) for chain in chains] == readable


@pytest.mark.parametrize("policy", list(POLICIES))
async def test_suffixes_go_before_their_parents(make: MakeSsd, policy: str) -> None:
    tier, chain = make(policy=policy), Chain(20)
    await tier.put(chain)
    for number in range(150):
        await tier.put(Chain(1, first_token=10_000 + 8 * number))
        held = [tier.block(chain, index) is not None for index in range(20)]
        assert held == sorted(held, reverse=True)
    tier.tier.check_integrity()


async def test_no_tenant_evicts_anothers_share(make: MakeSsd) -> None:
    tier = make()
    small = [Chain(4, first_token=1000 * number) for number in range(3)]
    for chain in small:
        await tier.put(chain, tenant="small")
    for number in range(60):
        await tier.put(Chain(8, first_token=50_000 + 1000 * number), tenant="big")
    assert [await tier.num_readable(chain) for chain in small] == [4, 4, 4]


async def test_a_tenants_quota_is_a_limit(make: MakeSsd) -> None:
    tier = make(quota=Quota(tenant=0.25))
    for number in range(30):
        await tier.put(Chain(8, first_token=1000 * number), tenant="big")
    held = len(tier.tier.index) * slot.slot_bytes(LAYOUT.block_bytes)
    assert 0 < held <= tier.tier.segments.num_bytes / 4


async def test_a_quota_below_one_block_is_refused(make: MakeSsd) -> None:
    tier = make(quota=Quota(model=1e-6))
    with pytest.raises(KvError, match=r"a block takes \d+ bytes, the quota is \d+"):
        await tier.put(Chain(1))


async def test_the_journal_is_shortened_and_says_the_same(make: MakeSsd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.tiers.ssd._COMPACT_FROM", 50)
    tier = make()
    chains = [Chain(8, first_token=1000 * number) for number in range(60)]
    for chain in chains:
        await tier.put(chain)
    await tier.tier.settle()
    assert tier.tier._journal.num_records < 4 * len(tier.tier.index)
    readable = [await tier.num_readable(chain) for chain in chains]
    tier.kill()
    again = make()
    assert [await again.num_readable(chain) for chain in chains] == readable
