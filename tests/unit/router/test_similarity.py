"""Sketches and their index: kernel and reference agree, strangers behind a hot prefix differ, only neighbours that add blocks are found."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from services.router import similarity
from services.router import sketch as sketches
from services.router.similarity import Remembered, SimilarityIndex, common_blocks, pack_sketches, unpack_sketches
from services.router.sketch import NUM_BUCKETS, WHOLE, Sketch, Sketcher, Terms, ends_of, shingle_hashes, simhash
from services.router.terms import TermCounts
from shared.types import pack_tokens

TENANT, OTHER, MODEL = "a" * 16, "b" * 16, "0" * 16


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(49_152), k=count)


def terms(version: int = 1, hot: bytes = b"", seed: int = 1) -> Terms:
    weights = np.random.default_rng(seed).integers(0, 16, NUM_BUCKETS, dtype=np.uint8)
    return Terms(version, 100, weights.tobytes(), hot)


@pytest.mark.parametrize("count", [2, 3, 60, 256, 257, 1030, 5000])
@pytest.mark.parametrize("num_hot", [0, 5])
def test_kernel_and_reference_sketch_the_same(count: int, num_hot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = b"".join(bytes([number]) * 16 for number in range(num_hot + 2))
    sketcher, packed = Sketcher(terms(hot=keys[: 16 * num_hot])), pack_tokens(tokens(1, count))
    assert sketches.KERNEL is not None, "the test machine has a C compiler"
    by_kernel = sketcher.sketch(packed, keys, 16)
    monkeypatch.setattr(sketches, "KERNEL", None)
    assert sketcher.sketch(packed, keys, 16) == by_kernel
    assert len(by_kernel) <= len(ends_of(count)[0])


def test_the_reference_is_a_simhash() -> None:
    weights = np.ones(NUM_BUCKETS, dtype=np.uint8)
    prompt = tokens(3, 1000)
    edited = prompt.copy()
    edited[500] = 7
    [[ours], [edit], [other]] = [simhash(pack_tokens(each), 0, [1000], weights)[0] for each in (prompt, edited, tokens(4, 1000))]
    assert (ours ^ edit).bit_count() <= 6
    assert (ours ^ other).bit_count() > 16


def test_a_shared_system_prompt_makes_no_strangers_alike() -> None:
    system, keys = tokens(5, 800), b"".join(bytes([number]) * 16 for number in range(50))
    plain, knowing = Sketcher(), Sketcher(terms(hot=keys))
    near = {False: 0, True: 0}
    for seed in range(100):
        ours, theirs = (pack_tokens(system + tokens(1000 + 2 * seed + side, 100)) for side in (0, 1))
        for knows, sketcher in ((False, plain), (True, knowing)):
            one, two = (sketcher.sketch(each, keys, 16)[-1].code for each in (ours, theirs))
            near[knows] += (one ^ two).bit_count() <= 6
    assert near[True] == 0
    assert near[False] > 0, "the plain sketch would have been fooled"


def test_a_span_with_little_of_its_own_does_not_qualify() -> None:
    keys = b"".join(bytes([number]) * 16 for number in range(50))
    spans = [sketch.span for sketch in Sketcher(terms(hot=keys)).sketch(pack_tokens(tokens(1, 850)), keys, 16)]
    assert spans == [], "800 tokens are hot, 50 remain"


@pytest.fixture(params=["kernel", "faiss"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of the index runs over the kernel's scan, and over FAISS's own search."""
    if request.param == "faiss":
        monkeypatch.setattr(similarity, "KERNEL", None)


def test_only_neighbours_that_add_blocks() -> None:
    index = SimilarityIndex()
    keys = random.Random(1).randbytes(16 * 20)
    other = keys[: 16 * 8] + random.Random(2).randbytes(16 * 12)
    sketch = [Sketch(256, 0b1111), Sketch(WHOLE, 0)]
    index.add(TENANT, MODEL, sketch, 0, Remembered(other, "aaaaaaaa", None))
    near = [Sketch(256, 1 << 63), Sketch(WHOLE, 0b111111)]
    found = index.find(TENANT, MODEL, near, keys, 3)
    assert found is not None
    assert (found.prompt.decode_worker, found.num_blocks, found.distance) == ("aaaaaaaa", 8, 5)
    assert index.find(TENANT, MODEL, near, keys, 8) is None
    assert index.find(OTHER, MODEL, near, keys, 3) is None
    assert index.find(TENANT, "1" * 16, near, keys, 3) is None
    assert index.find(TENANT, MODEL, [Sketch(WHOLE, 0b1111111)], keys, 3) is None, "7 bits are too many"


def test_versions_are_never_compared() -> None:
    index = SimilarityIndex()
    prompt = Remembered(bytes(16), "aaaaaaaa", None)
    index.add(TENANT, MODEL, [Sketch(WHOLE, 0)], 1, prompt)
    assert len(index) == 0
    index.begin(1)
    index.add(TENANT, MODEL, [Sketch(WHOLE, 0)], 1, prompt)
    assert len(index) == 1
    index.begin(2)
    assert len(index) == 0


def test_slots_are_reused_and_groups_bounded() -> None:
    index = SimilarityIndex(capacity=4, max_groups=2)
    for number in range(11):
        index.add(TENANT, MODEL, [Sketch(WHOLE, 0xFF << (number * 4))], 0, Remembered(bytes([number]) * 16, "aaaaaaaa", None))
    assert len(index) == 4
    assert index.find(TENANT, MODEL, [Sketch(WHOLE, 0xFF << 40)], bytes([10]) * 16, 0) is not None
    assert index.find(TENANT, MODEL, [Sketch(WHOLE, 0xFF)], bytes([0]) * 16, 0) is None
    for span in (256, 512):
        index.add(TENANT, MODEL, [Sketch(span, 1)], 0, Remembered(bytes(16), "aaaaaaaa", None))
    assert len(index) == 2


def test_an_index_full_of_junk_finds_no_neighbour_that_is_none() -> None:
    """T37: the index lives in memory alone; what it says is a hint, and a neighbour counts only by the exact blocks it shares."""
    rng, index = random.Random(37), SimilarityIndex(capacity=2000)
    prompt = rng.randbytes(16 * 20)
    for _ in range(20_000):
        near = 0b1111 ^ 1 << rng.randrange(64)
        index.add(TENANT, MODEL, [Sketch(WHOLE, near)], 0, Remembered(rng.randbytes(16 * 20), "aaaaaaaa", None))
    assert len(index) == 2000
    assert index.find(TENANT, MODEL, [Sketch(WHOLE, 0b1111)], prompt, 0) is None
    index.add(TENANT, MODEL, [Sketch(WHOLE, 0b1111)], 0, Remembered(prompt, "bbbbbbbb", None))
    found = index.find(TENANT, MODEL, [Sketch(WHOLE, 0b1111)], prompt, 0)
    assert found is not None and (found.prompt.decode_worker, found.num_blocks) == ("bbbbbbbb", 20)


def test_common_blocks() -> None:
    keys = random.Random(1).randbytes(160)
    for count in range(11):
        assert common_blocks(keys, keys[: 16 * count] + bytes(16 * 3)) == count


def test_sketches_over_the_wire() -> None:
    some = [Sketch(256, 2**64 - 1), Sketch(WHOLE, 0)]
    assert unpack_sketches(pack_sketches(some)) == some
    for bad in ([1], [0, 2**64], [-1, 5]):
        with pytest.raises(ValueError, match=r"sketches|argument"):
            unpack_sketches(bad)


def chain(*names: str) -> bytes:
    """Keys of a chain: each names all before it."""
    return b"".join(hashlib.md5("/".join(names[: end + 1]).encode()).digest() for end in range(len(names)))


def test_blocks_that_many_chains_share_are_hot_and_long_conversations_are_not() -> None:
    counts = TermCounts()
    for number in range(9):
        counts.see(b"", chain("system", "tools", f"question {number}"))
    talk = ["system", "tools", "talk"]
    for turn in range(30):
        talk.append(f"turn {turn}")
        counts.see(b"", chain(*talk))
    hot = counts.snapshot(1).hot
    assert {hot[at : at + 16] for at in range(0, len(hot), 16)} == {chain("system")[:16], chain("system", "tools")[16:]}


def test_what_every_prompt_has_weighs_nothing() -> None:
    counts, common = TermCounts(), tokens(1, 50)
    for seed in range(50):
        counts.see(pack_tokens(common + tokens(seed + 10, 200)), b"")
    terms = counts.snapshot(3)
    assert (terms.version, terms.num_prompts) == (3, 50)
    buckets = (shingle_hashes(pack_tokens(common)) >> np.uint64(48)).astype(np.int64)
    assert {terms.weights[bucket] for bucket in buckets.tolist()} == {0}
    assert max(terms.weights) == 15
