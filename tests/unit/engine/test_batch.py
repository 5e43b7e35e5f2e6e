"""The block tables of a step, against a plain reading of what each item asks for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.engine.batch import Batch, BatchItem
from shared.engine.sequence import Sequence
from shared.types import SamplingParams

SIZE = 4


def item(first_block: int, num_tokens: int, num_computed: int, num_new: int) -> BatchItem:
    """A sequence whose blocks are numbered downwards, so that no order can be guessed."""
    num_blocks = (num_tokens + SIZE) // SIZE + 1
    table = list(range(first_block + num_blocks - 1, first_block - 1, -1))
    tokens = [1000 * first_block + index for index in range(num_tokens)]
    return BatchItem(Sequence("", tokens, num_tokens, SamplingParams(), num_computed, table), num_new, True)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    items, first_block = [], 0
    for _ in range(draw(st.integers(1, 6))):
        num_tokens = draw(st.integers(1, 20))
        num_computed = draw(st.integers(0, num_tokens - 1))
        items.append(item(first_block, num_tokens, num_computed, draw(st.integers(1, num_tokens - num_computed))))
        first_block += 8
    return Batch(items)


@given(batches())
def test_the_plan_is_what_the_items_say(batch: Batch) -> None:
    plan, inputs = batch.plan(SIZE), batch.input_ids()
    assert batch.num_tokens == len(inputs) == len(plan.positions) == len(plan.slots) == plan.qo_indptr[-1]
    assert (plan.qo_indptr.dtype, plan.kv_indices.dtype, plan.positions.dtype) == (np.int32,) * 3
    assert plan.kv_indptr[-1] == len(plan.kv_indices)
    for number, (sequence, num_tokens, _) in enumerate(batch.items):
        start = sequence.num_computed_tokens
        positions = list(range(start, start + num_tokens))
        rows = slice(plan.qo_indptr[number], plan.qo_indptr[number + 1])
        assert inputs[rows].tolist() == [sequence.token_ids[position] for position in positions]
        assert plan.positions[rows].tolist() == positions
        assert plan.slots[rows].tolist() == [sequence.block_table[at // SIZE] * SIZE + at % SIZE for at in positions]
        context = start + num_tokens
        blocks = plan.kv_indices[plan.kv_indptr[number] : plan.kv_indptr[number + 1]].tolist()
        assert blocks == sequence.block_table[: -(-context // SIZE)]
        assert 1 <= plan.kv_last_page_len[number] <= SIZE
        assert plan.kv_lens[number] == context


def test_full_last_blocks_are_full() -> None:
    plan = Batch([item(0, 8, 4, 4), item(8, 9, 8, 1)]).plan(SIZE)
    assert plan.kv_last_page_len.tolist() == [4, 1]
    assert plan.kv_indptr.tolist() == [0, 2, 5]
