"""The engine's greedy tokens are transformers' on the bundled model in float32: alone, eight at once in chunks, and from cached blocks."""

import os
from collections.abc import Iterator

import pytest

from shared.engine import load
from shared.engine.config import EngineConfig
from tests.support.engine_driver import EngineDriver
from tests.support.model_fixture import MODEL
from tests.support.oracle import Oracle, OraclePrompt, load_oracle

PROMPTS = load_oracle()

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def driver() -> Iterator[EngineDriver]:
    engine = load(
        EngineConfig(model=MODEL, numerics="exact", kv_device=400 * 2**20, threads=os.cpu_count() or 1), lambda text, fraction: None
    )
    yield EngineDriver(engine)
    engine.close()


def check(driver: EngineDriver, prompts: list[OraclePrompt], chunk: int) -> None:
    """Generate for all prompts at once."""
    driver.reset()
    sequences = [driver.add(prompt.token_ids, room=16) for prompt in prompts]
    answers = driver.generate(sequences, 12, chunk)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer[: len(prompt.output)] == prompt.output, prompt.name


def test_the_oracle_holds_what_it_must() -> None:
    assert len(PROMPTS) >= 24
    assert {1, 15, 16, 17, 31, 512, 1500} <= {len(prompt.token_ids) for prompt in PROMPTS}
    assert any(prompt.messages for prompt in PROMPTS)
    assert sum(len(prompt.output) == 12 for prompt in PROMPTS) >= 18


@pytest.mark.parametrize("prompt", PROMPTS[::3], ids=lambda prompt: prompt.name)
def test_alone(driver: EngineDriver, prompt: OraclePrompt) -> None:
    check(driver, [prompt], chunk=10**9)


@pytest.mark.parametrize("start", range(0, len(PROMPTS), 8))
def test_eight_at_once_in_chunks(driver: EngineDriver, start: int) -> None:
    """Some decode while others still prefill: chunks of 100 end inside blocks."""
    check(driver, PROMPTS[start : start + 8], chunk=100)


def test_from_cached_blocks(driver: EngineDriver) -> None:
    """The second time all whole blocks but the last tokens' are found in the pool; a longer prompt shares a shorter one's."""
    driver.reset()
    first = [driver.add(prompt.token_ids) for prompt in PROMPTS if len(prompt.token_ids) in (31, 512, 734)]
    driver.generate(first, 1)
    again = [driver.add(sequence.token_ids[: sequence.num_prompt_tokens], cached=sequence) for sequence in first]
    assert [sequence.num_computed_tokens for sequence in again] == [16, 496, 720]
    expected = [prompt.output for prompt in PROMPTS if len(prompt.token_ids) in (31, 512, 734)]
    assert driver.generate(again, 12) == expected


def test_the_oracle_is_transformers() -> None:
    """The recorded answers of some prompts, computed again."""
    oracle = Oracle()
    for prompt in (PROMPTS[1], PROMPTS[9], PROMPTS[17]):
        answer = oracle.answer(prompt.name, text=prompt.text, messages=prompt.messages)
        assert (answer.token_ids, answer.output) == (prompt.token_ids, prompt.output)
