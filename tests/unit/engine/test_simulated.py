"""The simulated engine: deterministic whatever the batching, and wrong KV shows as wrong text."""

from __future__ import annotations

import pytest

from shared.engine.batch import Batch, BatchItem
from shared.engine.engine import EngineSpec
from shared.engine.sequence import Sequence
from shared.engine.simulated import Profile, SimulatedEngine, parse_profile
from shared.errors import ConfigError, EngineError
from shared.kv.layout import KvLayout
from shared.types import SamplingParams

LAYOUT = KvLayout(num_layers=1, block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")


def engine(profile: Profile | None = None, slept: list[float] | None = None) -> SimulatedEngine:
    spec = EngineSpec(
        model_name="sim",
        model_path="",
        model_digest=bytes(32),
        layout=LAYOUT,
        num_blocks=64,
        max_model_len=512,
        vocab_size=1000,
        eos_token_ids=[2],
        numerics="exact",
        device="sim",
        dtype="float32",
        weight_format="simulated",
        commits_blocks=True,
    )
    sleeps = slept if slept is not None else []
    return SimulatedEngine(spec, profile or Profile(), sleeps.append)


def sequence(key: str, prompt: list[int], first_block: int, **sampling: float) -> Sequence:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Sequence(key, list(prompt), len(prompt), params, block_table=list(range(first_block, first_block + 16)))


def step(sim: SimulatedEngine, *items: tuple[Sequence, int, bool]) -> None:
    sampled = iter(sim.forward(Batch([BatchItem(*item) for item in items])))
    for one, num_tokens, sample in items:
        one.num_computed_tokens += num_tokens
        if sample:
            one.token_ids.append(next(sampled).token_id)


def generate(sim: SimulatedEngine, one: Sequence, count: int) -> list[int]:
    while one.num_output_tokens < count:
        step(sim, (one, one.num_uncomputed_tokens, True))
    return one.token_ids[one.num_prompt_tokens :]


def test_chunks_batches_and_migration_give_the_same_text() -> None:
    prompt = list(range(300, 311))
    whole = generate(engine(), sequence("a", prompt, 0), 12)
    sim = engine()
    one, other = sequence("a", prompt, 0), sequence("b", [400] * 5, 16)
    step(sim, (one, 3, False))
    step(sim, (other, 5, True), (one, 4, False))
    step(sim, (one, 4, True), (other, 1, True))
    assert generate(sim, one, 12) == whole
    moved = sequence("a", prompt + whole[:7], 0)
    moved.num_prompt_tokens = len(prompt)
    assert generate(engine(), moved, 12) == whole


def test_blocks_that_were_copied_are_used_and_wrong_ones_show() -> None:
    source = engine()
    one = sequence("a", list(range(300, 312)), 0)
    expected = generate(source, one, 6)
    blocks = [bytearray(LAYOUT.block_bytes) for _ in range(2)]
    source.export_blocks([0, 1], [memoryview(block) for block in blocks])
    for corrupt in (False, True):
        sim = engine()
        if corrupt:
            blocks[0][5] ^= 1
        loaded = sequence("b", list(range(300, 312)), 20)
        sim.import_blocks([20, 21], [memoryview(block) for block in blocks])
        loaded.num_computed_tokens = 8
        assert (generate(sim, loaded, 6) == expected) is not corrupt


def test_other_blocks_behind_a_known_sequence_show() -> None:
    """It was preempted, and placed again at the same length into blocks that came from elsewhere."""
    expected = generate(engine(), sequence("a", list(range(300, 312)), 0), 6)
    for has_right_blocks in (True, False):
        sim = engine()
        one = sequence("a", list(range(300, 312)), 0)
        step(sim, (one, 8, False))
        step(sim, (sequence("b", list(range(300 if has_right_blocks else 700, 712)), 20), 8, False))
        one.block_table = list(range(20, 36))
        assert (generate(sim, one, 6) == expected) is has_right_blocks


def test_the_seed_matters_only_with_a_temperature() -> None:
    prompt = [300, 301]
    greedy = [generate(engine(), sequence("a", prompt, 0, temperature=0.0, seed=seed), 4) for seed in (1, 2)]
    random = [generate(engine(), sequence("a", prompt, 0, temperature=1.0, seed=seed), 4) for seed in (1, 2, 1)]
    assert greedy[0] == greedy[1]
    assert random[0] == random[2] != random[1]


def test_time_follows_the_profile() -> None:
    slept: list[float] = []
    sim = engine(parse_profile("a=0.01,b=1,c=2,d=8,k=1000"), slept)
    one = sequence("a", [300] * 10, 0)
    step(sim, (one, 10, True))
    step(sim, (one, 1, True))
    assert slept == pytest.approx([(1 + 10 + 2) / 1000, (8 + 11) / 1000])


@pytest.mark.parametrize("text", ["a", "a=x", "z=1", "a=-1", "a=nan", "a=1e9"])
def test_a_bad_profile_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match="SS_SIM_PROFILE"):
        parse_profile(text)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(EngineError):
        engine().forward(Batch([]))
