"""The kernel and its reference copy the same bytes and sum them the same, whatever their number and place."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.summed_copy import SummedCopy, copy_summed, copy_then_sum

AROUND = 16


@pytest.fixture(scope="module", params=[copy_then_sum, copy_summed], ids=["reference", "kernel"])
def copy(request: pytest.FixtureRequest) -> SummedCopy:
    function: SummedCopy = request.param
    return function


def test_the_kernel_is_there() -> None:
    assert copy_summed is not copy_then_sum


@given(num_bytes=st.integers(0, 5000), skew=st.integers(0, 63), seed=st.integers(0, 2**32 - 1))
def test_exactly_these_bytes_and_their_xxh3(copy: SummedCopy, num_bytes: int, skew: int, seed: int) -> None:
    source = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    room = np.full(num_bytes + 2 * AROUND + skew, 7, np.uint8)
    target = room[AROUND + skew : AROUND + skew + num_bytes]
    assert copy(memoryview(target), memoryview(source)) == xxhash.xxh3_64_intdigest(source)
    assert (target == source).all()
    assert (room[: AROUND + skew] == 7).all() and (room[AROUND + skew + num_bytes :] == 7).all()


@pytest.mark.parametrize("num_bytes", [240, 241, 256, 257, 1024, 1025, 1088, 368_640, 1_000_003])
def test_sizes_at_the_edges(copy: SummedCopy, num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    target = np.zeros(num_bytes, np.uint8)
    assert copy(memoryview(target), memoryview(source)) == xxhash.xxh3_64_intdigest(source)
    assert (target == source).all()


def test_other_lengths_are_refused(copy: SummedCopy) -> None:
    with pytest.raises(ValueError):
        copy(memoryview(bytearray(300)), memoryview(bytes(301)))
