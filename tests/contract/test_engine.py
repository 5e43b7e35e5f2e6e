"""What services rely on, of every engine: the torch engine on a tiny random model, and the simulated engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.engine import load
from shared.engine.batch import Batch, BatchItem
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine
from shared.errors import EngineError
from shared.types import SamplingParams
from tests.support.engine_driver import EngineDriver
from tests.support.models import VOCAB_SIZE, tiny_model

PROMPTS = [[7], list(range(20, 35)), list(range(40, 56)), list(range(60, 77)), [5, 9] * 30, list(range(100, 200))]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model("llama3", folder)
    return folder


@pytest.fixture(scope="module", params=["cpu", "sim"])
def config(request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    cache_dir = tmp_path_factory.mktemp("cache")
    return EngineConfig(
        model=str(model_folder), device=request.param, numerics="exact", kv_device=4 * 2**20, cache_dir=cache_dir, threads=1
    )


@pytest.fixture(scope="module")
def engine(config: EngineConfig) -> Iterator[Engine]:
    engine = load(config, lambda text, fraction: None)
    engine.warm_up(lambda text, fraction: None)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: Engine) -> EngineDriver:
    return EngineDriver(engine)


def test_the_spec_says_what_is_served(engine: Engine, config: EngineConfig) -> None:
    spec = engine.spec
    assert len(spec.model_digest) == 32
    assert spec.vocab_size == VOCAB_SIZE
    assert spec.eos_token_ids == [2]
    assert 0 < spec.num_blocks * spec.layout.block_bytes <= config.kv_device
    assert spec.max_model_len <= 512
    assert (Path(spec.model_path) / "tokenizer.json").exists()
    assert spec.device == config.device
    assert msgspec.convert(msgspec.to_builtins(spec), type(spec)) == spec


def test_the_digest_names_model_and_numerics(engine: Engine, config: EngineConfig) -> None:
    def digest(**changes: object) -> bytes:
        return load(msgspec.structs.replace(config, **changes), lambda text, fraction: None).spec.model_digest

    assert digest() == engine.spec.model_digest
    assert digest(kv_device=2**21) == engine.spec.model_digest
    others = {digest(numerics="default"), digest(block_size=8)}
    assert len(others | {engine.spec.model_digest}) == 3


def test_alone_and_together_in_any_order_and_chunks(driver: EngineDriver) -> None:
    alone = [driver.generate([driver.add(prompt)], 6)[0] for prompt in PROMPTS]
    driver.reset()
    assert driver.generate([driver.add(prompt) for prompt in PROMPTS], 6) == alone
    driver.reset()
    assert driver.generate([driver.add(prompt) for prompt in reversed(PROMPTS)], 6, chunk=7) == alone[::-1]


def test_samples_only_where_asked(driver: EngineDriver) -> None:
    first, second, third = (driver.add(prompt) for prompt in PROMPTS[3:6])
    batch = Batch([BatchItem(first, 17, True), BatchItem(second, 20, False), BatchItem(third, 100, True)])
    sampled = driver.engine.forward(batch)
    assert len(sampled) == 2
    assert driver.engine.forward(Batch([BatchItem(second, 60, False)])) == []
    assert [token.token_id for token in sampled] == [driver.generate([driver.add(prompt)], 1)[0][0] for prompt in (PROMPTS[3], PROMPTS[5])]


def test_forward_changes_no_sequence(driver: EngineDriver) -> None:
    sequence = driver.add(PROMPTS[4])
    before = copy.deepcopy(sequence)
    driver.engine.forward(Batch([BatchItem(sequence, 60, True)]))
    assert sequence == before


def test_cached_blocks_change_nothing(driver: EngineDriver) -> None:
    first = driver.add(PROMPTS[5])
    [expected] = driver.generate([first], 5)
    second = driver.add(PROMPTS[5], cached=first)
    assert second.num_computed_tokens == 96
    assert driver.generate([second], 5) == [expected]


def test_blocks_travel_between_engines(driver: EngineDriver, config: EngineConfig) -> None:
    """Another engine goes on from exported blocks, at other places in its pool, as if it had computed them."""
    source = driver.add(PROMPTS[5])
    [expected] = driver.generate([source], 5)
    buffers = [memoryview(bytearray(driver.engine.spec.layout.block_bytes)) for _ in range(6)]
    driver.engine.export_blocks(source.block_table[:6], buffers)
    other = EngineDriver(load(config, lambda text, fraction: None))
    other.add([1] * 30)
    target = other.add(PROMPTS[5])
    other.engine.import_blocks(target.block_table[:6], [buffer.toreadonly() for buffer in buffers])
    target.num_computed_tokens = 96
    assert other.generate([target], 5) == [expected]


def test_foreign_blocks_give_other_text(driver: EngineDriver) -> None:
    """The KV really is read: else the test above says nothing."""
    source = driver.add(PROMPTS[5])
    [expected] = driver.generate([source], 5)
    foreign = driver.add([3] * 100)
    driver.generate([foreign], 1)
    mixed = driver.add(PROMPTS[5])
    mixed.block_table[:6] = foreign.block_table[:6]
    mixed.num_computed_tokens = 96
    assert driver.generate([mixed], 5) != [expected]


def test_blocks_are_copied_while_others_are_computed(driver: EngineDriver) -> None:
    """export_blocks and import_blocks run in another thread, on blocks that no forward uses."""
    kept, moved = driver.add(PROMPTS[5]), driver.add(PROMPTS[5])
    driver.generate([kept], 1)
    buffers = [memoryview(bytearray(driver.engine.spec.layout.block_bytes)) for _ in range(6)]
    stop = threading.Event()

    def move() -> None:
        while not stop.is_set():
            driver.engine.export_blocks(kept.block_table[:6], buffers)
            driver.engine.import_blocks(moved.block_table[:6], buffers)

    thread = threading.Thread(target=move)
    thread.start()
    computed = driver.generate([driver.add(prompt) for prompt in PROMPTS], 6, chunk=9)
    stop.set()
    thread.join()
    driver.reset()
    assert computed == driver.generate([driver.add(prompt) for prompt in PROMPTS], 6)


def test_the_seed_decides_at_a_temperature(driver: EngineDriver) -> None:
    def text(seed: int) -> list[int]:
        driver.reset()
        return driver.generate([driver.add(PROMPTS[1], sampling=SamplingParams(temperature=1.0, seed=seed))], 6)[0]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_migrated_request_goes_on_as_it_began(driver: EngineDriver) -> None:
    """Another attempt has the emitted tokens behind its prompt and computes them anew."""
    sampling = SamplingParams(temperature=1.0, seed=3)
    [whole] = driver.generate([driver.add(PROMPTS[2], sampling=sampling)], 8)
    resumed = driver.add(PROMPTS[2] + whole[:3], sampling=sampling)
    resumed.num_prompt_tokens = len(PROMPTS[2])
    assert driver.generate([resumed], 8) == [whole]


def test_logprobs_come_where_asked(driver: EngineDriver) -> None:
    plain = driver.add(PROMPTS[1])
    asked = driver.add(PROMPTS[2], sampling=SamplingParams(temperature=0.0, num_logprobs=3))
    first, second = driver.step([plain, asked])
    assert first.logprob is None
    assert second.logprob is not None
    assert second.logprob.top_ids[0] == second.token_id
    assert len(second.logprob.top_ids) == len(second.logprob.top_logprobs) == 3
    assert second.logprob.logprob <= 0


def test_an_empty_batch_is_an_error(engine: Engine) -> None:
    with pytest.raises(EngineError):
        engine.forward(Batch([]))


def test_close_twice(config: EngineConfig) -> None:
    other = load(config, lambda text, fraction: None)
    other.close()
    other.close()
