"""The sampler against the definition, row by row in numpy float64."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.engine.random import uniform
from shared.engine.sampler import TOP_P_CANDIDATES, Sampler, _at_height
from shared.engine.sequence import Sequence
from shared.errors import EngineError
from shared.types import SamplingParams

VOCAB = 50
EOS = 3
SAMPLER = Sampler([EOS], VOCAB)


def sequence(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> Sequence:
    prompt = [1, 2] if prompt is None else prompt
    return Sequence("test", prompt + (output or []), len(prompt), SamplingParams(**sampling))


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).float()


def sample(logits: torch.Tensor, *sequences: Sequence) -> list[int]:
    return [sampled.token_id for sampled in Sampler([EOS], logits.shape[-1]).sample(logits.clone(), list(sequences))]


def processed(logits: NDArray[np.float64], row: Sequence) -> NDArray[np.float64]:
    """The logits after bias, forbidden ends and penalties, by the definition."""
    scores, sampling = logits.copy(), row.sampling
    for token_id, amount in sampling.logit_bias.items():
        scores[token_id] += amount
    if row.num_output_tokens < sampling.min_tokens:
        scores[[*sampling.stop_token_ids, *([] if sampling.ignore_eos else [EOS])]] = -np.inf
    output = row.token_ids[row.num_prompt_tokens :]
    for token_id in range(len(scores)):
        if token_id in row.token_ids:
            scores[token_id] *= sampling.repetition_penalty if scores[token_id] <= 0 else 1 / sampling.repetition_penalty
        scores[token_id] -= sampling.frequency_penalty * output.count(token_id)
        scores[token_id] -= sampling.presence_penalty * (token_id in output)
    return scores


def distribution(logits: NDArray[np.float64], row: Sequence, edge: float = 1.0) -> NDArray[np.float64]:
    """What a token is drawn from, by the definition; the limits of min-p and top-p are moved by the factor `edge`."""
    sampling = row.sampling
    scores = processed(logits, row) / sampling.temperature
    with np.errstate(divide="ignore"):
        scores = np.where(scores < scores.max() + np.log(min(1.0, sampling.min_p * edge)), -np.inf, scores)
    if sampling.top_k:
        scores = np.where(scores < np.sort(scores)[::-1][min(sampling.top_k, len(scores)) - 1], -np.inf, scores)
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= sampling.top_p * edge]] = 0.0
    return weights / weights.sum()


def test_greedy_takes_the_likeliest() -> None:
    logits = random_logits(4)
    assert sample(logits, *[sequence(temperature=0.0) for _ in range(4)]) == logits.argmax(dim=-1).tolist()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(1)
    assert sample(logits, sequence(temperature=1e-30)) == [int(logits.argmax())]


def test_draws_follow_the_softmax() -> None:
    logits = random_logits(1, vocab=5) / 3
    probabilities = logits.softmax(dim=-1)[0].numpy()
    rows = [sequence(prompt=[0] * (1 + index % 50), seed=index) for index in range(4000)]
    counts = np.bincount(sample(logits.repeat(len(rows), 1), *rows), minlength=5)
    expected = probabilities * len(rows)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001


def test_a_row_depends_neither_on_its_place_nor_on_its_neighbours() -> None:
    logits = random_logits(6, seed=4)
    rows = [
        sequence(temperature=0.0),
        sequence(seed=1, top_p=0.8),
        sequence(seed=2, top_k=5, repetition_penalty=1.5),
        sequence(seed=3, min_p=0.1, temperature=2.0),
        sequence(seed=4, logit_bias={7: 4.0}),
        sequence(seed=5),
    ]
    together = sample(logits, *rows)
    assert [sample(logits[[index]], row)[0] for index, row in enumerate(rows)] == together
    assert sample(logits.flip(0), *rows[::-1]) == together[::-1]


def test_the_seed_and_the_position_decide() -> None:
    logits = torch.zeros(1, VOCAB)
    assert sample(logits, sequence(seed=5)) == sample(logits, sequence(seed=5))
    assert len({sample(logits, sequence(seed=seed))[0] for seed in range(40)}) > 20
    assert len({sample(logits, sequence(prompt=[1] * (1 + position), seed=5))[0] for position in range(40)}) > 20


def test_a_migrated_request_draws_the_same() -> None:
    """The next attempt's tokens are prompt and output as before: the position is the same, whatever is called prompt."""
    logits = random_logits(1)
    assert sample(logits, sequence([1, 2], [4, 5], seed=9)) == sample(logits, sequence([1, 2, 4, 5], [], seed=9))


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    sampling=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 1, 3, 40, 10**6]),
            "top_p": st.sampled_from([1.0, 0.95, 0.5, 0.01]),
            "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
            "presence_penalty": st.sampled_from([0.0, -2.0, 1.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.7, -1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3),
            "min_tokens": st.sampled_from([0, 4]),
            "stop_token_ids": st.lists(st.integers(0, 6), max_size=2),
            "ignore_eos": st.booleans(),
        }
    ),
)
def test_any_parameters_give_what_the_definition_gives(seed: int, prompt: list[int], output: list[int], sampling: dict[str, Any]) -> None:
    row = sequence(prompt, output, seed=seed, **sampling)
    logits = random_logits(1, seed=seed % 1000)
    exact = logits[0].double().numpy()
    if row.sampling.temperature == 0.0:
        scores = processed(exact, row)
        assume(np.diff(np.sort(scores)[-2:])[0] > 1e-4)
        assert sample(logits, row) == [int(scores.argmax())]
        return
    cumulative = distribution(exact, row).cumsum()
    draw = uniform(seed, row.num_tokens)
    assume(np.abs(cumulative - draw).min() > 1e-5)  # else float32 may land on the neighbour
    for edge in (1 - 1e-5, 1 + 1e-5):  # and a token at the edge of a set may be in it or not
        moved = distribution(exact, row, edge=edge).cumsum()
        assume(np.abs(moved - cumulative).max() < 1e-9)
    assert sample(logits, row) == [int(np.searchsorted(cumulative, draw, side="right"))]


@pytest.mark.parametrize("factor", [0.5, 3, 100])
def test_top_p_that_needs_more_than_the_candidates(factor: float) -> None:
    vocab = int(TOP_P_CANDIDATES * factor)
    logits = random_logits(2, vocab=vocab) / 100
    rows = [sequence(seed=seed, top_p=0.9) for seed in (1, 2)]
    for logit, row, token_id in zip(logits.double().numpy(), rows, sample(logits, *rows), strict=True):
        cumulative = distribution(logit, row).cumsum()
        assert token_id == int(np.searchsorted(cumulative, uniform(row.sampling.seed, row.num_tokens), side="right"))


def test_ends_are_forbidden_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 7] = 50.0, 40.0
    assert sample(logits, sequence(temperature=0.0, min_tokens=2, stop_token_ids=[7], output=[4])) not in ([EOS], [7])
    assert sample(logits, sequence(temperature=0.0, min_tokens=2, stop_token_ids=[7], output=[4, 5])) == [EOS]
    assert sample(logits, sequence(temperature=0.0, min_tokens=2, stop_token_ids=[7], ignore_eos=True)) == [EOS]


def test_a_bias_on_a_token_that_does_not_exist_is_nothing() -> None:
    logits = random_logits(1)
    assert sample(logits, sequence(temperature=0.0, logit_bias={VOCAB: 100.0})) == [int(logits.argmax())]


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    own = logits.double().log_softmax(dim=-1)
    rows = [
        sequence(temperature=0.0, num_logprobs=2, logit_bias={11: 100.0}),
        sequence(temperature=0.0),
        sequence(temperature=2.0, num_logprobs=0, repetition_penalty=2.0),
    ]
    first, second, third = SAMPLER.sample(logits.clone(), rows)
    assert first.token_id == 11
    assert first.logprob is not None
    assert math.isclose(first.logprob.logprob, own[0, 11], abs_tol=1e-5)
    assert first.logprob.top_ids == own[0].topk(2).indices.tolist()
    assert np.allclose(first.logprob.top_logprobs, own[0].topk(2).values, atol=1e-5)
    assert second.logprob is None
    assert third.logprob is not None
    assert math.isclose(third.logprob.logprob, own[2, third.token_id], abs_tol=1e-5)
    assert third.logprob.top_ids == []
    assert msgspec.msgpack.encode(first)


def test_not_a_number_is_an_error() -> None:
    logits = random_logits(2)
    logits[1, 4] = float("nan")
    with pytest.raises(EngineError, match="not a number"):
        SAMPLER.sample(logits, [sequence(), sequence()])


def test_a_token_of_no_mass_is_never_drawn() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 20] = 0.0
    rows = [sequence(seed=seed) for seed in range(300)]
    assert set(sample(logits.repeat(300, 1), *rows)) == {20}


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 1000])
@pytest.mark.parametrize("mass", ["one", "edges", "all"])
def test_the_ends_of_the_running_sum(vocab: int, mass: str) -> None:
    """Heights 0 and nearly 1, where the mass lies at the ends of the chunks of the running sum."""
    weights = torch.zeros(1, vocab)
    places = {"one": [vocab - 1], "edges": sorted({0, min(255, vocab - 1), vocab - 1}), "all": list(range(vocab))}[mass]
    weights[0, places] = 1.0 / 3.0
    for height, expected in ((0.0, places[0]), (1 - 2.0**-52, places[-1])):
        assert _at_height(weights, torch.tensor([[height]], dtype=torch.float64)).tolist() == [expected]
