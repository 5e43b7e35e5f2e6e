"""The kernels and their references are the same: block table, choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.router.choose import Chooser, Holding, KernelChooser, NumpyChooser, Vector
from services.router.holders import HolderSets
from services.router.index import PrefixIndex
from services.router.kernel import KERNEL, TABLE_KERNEL
from services.router.load import Booking, Loads
from services.router.score import Weights
from services.router.table import BlockTable, DictTable, KernelTable
from shared.kv.hashing import split
from shared.messages.kv import BlocksStored, KvSnapshot
from tests.unit.router.test_decide import KEYS, MODEL, lease


def kernel_table() -> BlockTable:
    assert TABLE_KERNEL is not None, "the test machine has a C compiler"
    return KernelTable(TABLE_KERNEL)


@pytest.fixture(params=[DictTable, kernel_table])
def table(request: pytest.FixtureRequest) -> BlockTable:
    make: Callable[[], BlockTable] = request.param
    return make()


def put(table: BlockTable, keys: list[bytes], numbers: Sequence[int]) -> None:
    table.assign(b"".join(keys), [(number, at + 1) for at, number in enumerate(numbers)])


def numbers_of(table: BlockTable, keys: list[bytes]) -> list[int]:
    return [number for key in keys for number, _ in table.all_runs(key)]


def test_what_was_set_is_found_and_what_was_deleted_is_not(table: BlockTable) -> None:
    generator, truth = random.Random(1), dict[bytes, int]()
    keys = [generator.randbytes(16) for _ in range(3000)]
    for _ in range(200):
        some = generator.sample(keys, 50)
        numbers = [generator.randrange(4) for _ in some]
        put(table, some, numbers)
        for key, number in zip(some, numbers, strict=True):
            truth.pop(key, None)
            if number:
                truth[key] = number
    assert len(table) == len(truth)
    assert numbers_of(table, keys) == [truth.get(key, 0) for key in keys]
    assert table.counts(5) == [0, *(list(truth.values()).count(number) for number in range(1, 5))]
    packed, numbers_found = table.content()
    assert dict(zip(split(packed, 16), numbers_found.tolist(), strict=True)) == truth


def test_keys_that_differ_in_one_half_only_are_different(table: BlockTable) -> None:
    keys = [bytes(8) + bytes([number] * 8) for number in range(64)]
    put(table, keys, range(1, 65))
    put(table, keys[::2], [0] * 32)
    assert numbers_of(table, keys) == [0 if number % 2 else number for number in range(1, 65)]


def test_runs_end_where_the_number_changes_and_at_the_first_miss(table: BlockTable) -> None:
    put(table, KEYS[:8], [1, 1, 1, 2, 2, 1, 1, 3])
    assert table.runs(b"".join(KEYS[:12]), 12) == [(1, 3), (2, 5), (1, 7), (3, 8)]
    assert table.runs(b"".join(KEYS[:12]), 4) == [(1, 3), (2, 4)]
    assert table.runs(b"".join(KEYS[9:12]), 3) == []
    assert table.runs(b"", 0) == []
    assert table.all_runs(b"".join(KEYS[6:10])) == [(1, 1), (3, 2), (0, 4)]


def test_the_table_grows(table: BlockTable) -> None:
    packed = np.random.default_rng(3).bytes(16 * 20_000)
    table.assign(packed, [(7000, 20_000)])
    assert len(table) == 20_000
    assert table.runs(packed, 20_000) == [(7000, 20_000)]


def test_what_is_gone_is_swept_out_and_nothing_else(table: BlockTable) -> None:
    generator = random.Random(2)
    keys = [generator.randbytes(16) for _ in range(5000)]
    numbers = [generator.choice((1, 2, 3)) for _ in keys]
    put(table, keys, numbers)
    table.mark(2, True)
    assert (len(table), table.num_gone) == (5000 - numbers.count(2), numbers.count(2))
    put(table, keys[:1], [2])
    put(table, keys[1:2], [1])
    while table.num_gone:
        table.sweep(100)
    numbers[:2] = [2, 1]
    assert numbers_of(table, keys) == [0 if number == 2 else number for number in numbers]
    table.mark(2, False)
    put(table, keys[:1], [2])
    assert table.num_gone == 0


def chosen(chooser: Chooser, seed: int) -> list[tuple[int, list[float]]]:
    """A few decisions over random loads and holders."""
    generator, index, loads = random.Random(seed), PrefixIndex(), Loads()
    names = [f"{number:08x}" for number in range(generator.randrange(1, 30))]
    for name in names:
        loads.lease(lease(name, host=generator.choice([None, "11111111"])), True)
        for number in range(generator.randrange(20)):
            loads.book(f"{name}{number}", name, Booking(generator.randrange(20), generator.randrange(500), float(generator.randrange(3))))
        index.install(name, [KvSnapshot(name, 1, 0, [BlocksStored("device", b"", b"".join(KEYS[: generator.randrange(1, 20)]))])])
    index.install("11111111", [KvSnapshot("11111111", 1, 0, [BlocksStored("dram", b"", b"".join(KEYS[:12]))])])
    values = Weights(load_blocks=0.25, active_requests=0.5).vector()
    at = Holding(loads.pool("decode", MODEL), index)
    found = []
    for draw in range(10):
        lengths = index.lengths(index.runs(b"".join(KEYS[:30]), 30))
        expected = np.full(len(names), 25, dtype=np.int32) * (np.arange(len(names)) == 3) if draw % 2 else None
        choice = chooser.decode(at, Vector.of(values), lengths, expected, 31.5, 32, draw)
        row, cost_s = chooser.prefill(at, lengths, expected, 500, draw)
        found.append((choice.row, choice.told.ravel().tolist()))
        found.append((row, [cost_s]))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_both_choose_the_same(seed: int) -> None:
    assert KERNEL is not None, "the test machine has a C compiler"
    for ours, reference in zip(chosen(KernelChooser(KERNEL), seed), chosen(NumpyChooser(), seed), strict=True):
        assert ours[0] == reference[0]
        assert ours[1] == pytest.approx(reference[1], abs=1e-9)


def test_sets_of_holders_out_of_use_are_forgotten() -> None:
    index = PrefixIndex()
    index._sets = HolderSets(index._table, max_sets=10)
    for number in range(200):
        name = f"{number % 7:08x}"
        index.drop(name)
        held = b"".join(KEYS[: number % 13 + 1])
        assert index.install(name, [KvSnapshot(name, number, 0, [BlocksStored("device", b"", held)])])
    assert {holder.source: run for holder, run in index.overlap(KEYS).items()} == {
        f"{number % 7:08x}": number % 13 + 1 for number in range(193, 200)
    }
    assert len(index._sets.bits) < 100
