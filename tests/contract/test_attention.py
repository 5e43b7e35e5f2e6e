"""Every attention backend gives what the definition gives, over ragged batches, and writes nothing but the planned slots."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.engine.attention import BACKENDS, AttentionShape, create_attention
from shared.engine.batch import AttentionPlan, Batch, BatchItem
from shared.engine.paged_cache import PagedKvCache
from shared.engine.sequence import Sequence
from shared.errors import ConfigError
from shared.kv.layout import KvLayout
from shared.types import SamplingParams

NUM_LAYERS = 2
Float = NDArray[np.float64]


class Scene:
    """A pool full of foreign (huge) numbers, sequences with computed context in scattered blocks, and new tokens for each."""

    def __init__(self, backend: str, spans: list[tuple[int, int]], **options: int | str) -> None:
        """`spans`: (tokens computed before, new tokens) of each sequence."""
        settings: dict[str, int | str] = {
            "block_size": 4,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "window": 0,
            "dtype": "float32",
        }
        settings |= options
        self.block_size, self.window = int(settings["block_size"]), int(settings["window"])
        num_kv_heads, head_dim, dtype = int(settings["num_kv_heads"]), int(settings["head_dim"]), str(settings["dtype"])
        self.shape = AttentionShape(int(settings["num_heads"]), num_kv_heads, head_dim, 0.3, (0, self.window))
        self.random = np.random.default_rng(len(spans) * 31 + sum(a * 7 + b for a, b in spans))
        tables = [-(-(before + new) // self.block_size) for before, new in spans]
        self.num_blocks = sum(tables) + 3
        layout = KvLayout(num_layers=NUM_LAYERS, block_size=self.block_size, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)
        self.cache = PagedKvCache(layout, self.num_blocks, torch.device("cpu"))
        self.cache.pool.fill_(1e4)
        self.backend = create_attention(backend, self.shape, self.cache)
        blocks = iter(self.random.permutation(self.num_blocks).tolist())
        self.sequences = [
            Sequence("test", [0] * (before + new), before + new, SamplingParams(), before, [next(blocks) for _ in range(num_blocks)])
            for (before, new), num_blocks in zip(spans, tables, strict=True)
        ]
        for sequence in self.sequences:
            for position in range(sequence.num_computed_tokens):
                slot = self.cache.pool[sequence.block_table[position // self.block_size], :, :, position % self.block_size]
                slot.copy_(torch.from_numpy(self.random.normal(size=tuple(slot.shape))))
        items = [BatchItem(sequence, new, True) for sequence, (_, new) in zip(self.sequences, spans, strict=True)]
        self.plan: AttentionPlan = Batch(items).plan(self.block_size)
        num_tokens = len(self.plan.positions)
        self.query = self._rounded((num_tokens, self.shape.num_heads, head_dim))
        self.key = self._rounded((num_tokens, num_kv_heads, head_dim))
        self.value = self._rounded((num_tokens, num_kv_heads, head_dim))

    def run(self, layer: int) -> Float:
        """[N, num_heads * head_dim]."""
        self.backend.plan(self.plan)
        return self.backend.run(layer, self.query, self.key, self.value).double().numpy()

    def expected(self, layer: int) -> Float:
        """The definition, one token and one head at a time, from the pool as it is after `run`."""
        rows: list[Float] = []
        pool = self.cache.pool.double().numpy()
        group = self.shape.num_heads // self.shape.num_kv_heads
        query = self.query.double().numpy()
        for sequence, start, end in zip(self.sequences, self.plan.qo_indptr, self.plan.qo_indptr[1:], strict=False):
            keys, values = (np.concatenate([pool[block, layer, kind] for block in sequence.block_table]) for kind in (0, 1))
            for row in range(start, end):
                position = int(self.plan.positions[row])
                first = max(0, position + 1 - self.shape.windows[layer]) if self.shape.windows[layer] else 0
                heads = [
                    _attend(query[row, head], keys[first : position + 1, head // group], values[first : position + 1, head // group])
                    for head in range(self.shape.num_heads)
                ]
                rows.append(np.concatenate(heads))
        return np.stack(rows)

    def _rounded(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.random.normal(size=shape)).to(self.cache.pool.dtype)


def _attend(query: Float, keys: Float, values: Float) -> Float:
    scores = keys @ query * 0.3
    weights = np.exp(scores - scores.max())
    attended: Float = weights @ values / weights.sum()
    return attended


@pytest.fixture(params=list(BACKENDS))
def scene(request: pytest.FixtureRequest) -> Callable[..., Scene]:
    return lambda spans, **options: Scene(request.param, spans, **options)


SPANS = {
    "one decodes": [(9, 1)],
    "first token of all": [(0, 1)],
    "many decode": [(9, 1), (1, 1), (30, 1), (16, 1), (3, 1)],
    "one prefills": [(0, 13)],
    "a chunk": [(6, 9)],
    "a chunk at a block's edge": [(8, 4)],
    "mixed": [(9, 1), (0, 13), (6, 9), (31, 1), (0, 1)],
}


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("window", [0, 5])
def test_equals_the_definition(scene: Callable[..., Scene], spans: list[tuple[int, int]], window: int, layer: int) -> None:
    scenery = scene(spans, window=window)
    np.testing.assert_allclose(scenery.run(layer), scenery.expected(layer), atol=1e-5)


@pytest.mark.parametrize("heads", [(3, 1, 8), (4, 4, 8), (6, 2, 64), (1, 1, 2)])
@pytest.mark.parametrize("block_size", [1, 16])
def test_other_shapes(scene: Callable[..., Scene], heads: tuple[int, int, int], block_size: int) -> None:
    num_heads, num_kv_heads, head_dim = heads
    scenery = scene(SPANS["mixed"], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    np.testing.assert_allclose(scenery.run(1), scenery.expected(1), atol=1e-5)


def test_bfloat16(scene: Callable[..., Scene]) -> None:
    scenery = scene(SPANS["mixed"], dtype="bfloat16")
    np.testing.assert_allclose(scenery.run(0), scenery.expected(0), atol=0.02 * np.abs(scenery.expected(0)).max())


def test_writes_the_planned_slots_and_nothing_else(scene: Callable[..., Scene]) -> None:
    scenery = scene(SPANS["mixed"])
    expected = scenery.cache.pool.clone()
    for row, slot in enumerate(scenery.plan.slots.tolist()):
        block, offset = divmod(slot, scenery.block_size)
        expected[block, 1, 0, offset], expected[block, 1, 1, offset] = scenery.key[row], scenery.value[row]
    scenery.run(1)
    assert torch.equal(scenery.cache.pool, expected)


def test_a_plan_holds_until_the_next(scene: Callable[..., Scene]) -> None:
    scenery = scene(SPANS["many decode"])
    first = scenery.run(0)
    other = scene(SPANS["mixed"])
    scenery.backend.plan(other.plan)
    np.testing.assert_array_equal(scenery.run(0), first)


@settings(max_examples=25, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 1, 6]),
)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_any_ragged_batch(backend: str, spans: list[tuple[int, int]], block_size: int, window: int) -> None:
    scenery = Scene(backend, spans, block_size=block_size, window=window)
    np.testing.assert_allclose(scenery.run(1), scenery.expected(1), atol=1e-5)


def test_an_unknown_backend_names_those_there_are() -> None:
    layout = KvLayout(num_layers=1, block_size=4, num_kv_heads=1, head_dim=4, dtype="float32")
    cache = PagedKvCache(layout, 1, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"SS_ATTENTION='flashinfer'.*reference"):
        create_attention("flashinfer", AttentionShape(1, 1, 4, 1.0, (0,)), cache)
