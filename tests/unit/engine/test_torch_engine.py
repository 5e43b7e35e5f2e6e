"""Settings that fit or do not, and forward passes that fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine import load, torch_engine
from shared.engine.batch import Batch, BatchItem
from shared.engine.config import EngineConfig
from shared.engine.torch_engine import TorchEngine, multiplies_bfloat16
from shared.errors import ConfigError, EngineError, EnvironmentFault
from tests.support.engine_driver import EngineDriver
from tests.support.models import tiny_model


def ignore(text: str, fraction: float | None) -> None:
    """Reports go nowhere."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "Tiny Llama (v1)"
    tiny_model("smollm2", folder)
    return folder


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> dict[str, Any]:
    return {"model": str(folder), "cache_dir": tmp_path, "kv_device": 2**20, "threads": 1}


def create(config: dict[str, Any], **changes: Any) -> TorchEngine:
    return torch_engine.load(EngineConfig(**(config | changes)), ignore)


@pytest.mark.parametrize(("field", "value", "reason"), [
    ("attention", "flashinfer", "SS_ATTENTION.*there is: auto, reference"),
    ("max_model_len", 513, "SS_MAX_MODEL_LEN.*512"),
    ("kv_device", 100, "SS_KV_DEVICE.*0 tokens"),
])  # fmt: skip
def test_a_setting_that_does_not_fit_is_named(config: dict[str, Any], field: str, value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        create(config, **{field: value})


def test_exact_numerics_is_float32(config: dict[str, Any]) -> None:
    assert create(config, numerics="exact").spec.dtype == "float32"
    with pytest.raises(ConfigError, match=r"SS_DTYPE='bfloat16'.*float32"):
        create(config, numerics="exact", dtype="bfloat16")


def test_a_pool_too_small_for_the_asked_length(config: dict[str, Any]) -> None:
    block_bytes = create(config).spec.layout.block_bytes
    assert create(config, kv_device=3 * block_bytes + 1).spec.num_blocks == 3
    assert create(config, kv_device=3 * block_bytes).spec.max_model_len == 48
    with pytest.raises(ConfigError, match=r"SS_KV_DEVICE.*48 tokens"):
        create(config, kv_device=3 * block_bytes, max_model_len=49)


def test_the_name_that_clients_use(config: dict[str, Any]) -> None:
    assert create(config).spec.model_name == "Tiny-Llama-v1"
    assert create(config, model_name="mine").spec.model_name == "mine"


def test_cuda_without_a_gpu_says_what_to_do(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFault, match="--device cuda") as fault:
        create(config, device="cuda")
    assert "--device cpu" in fault.value.remedy


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx2 fma", False), ("fpu avx512_bf16", True), ("amx_tile amx_bf16 x", True), ("abf16", False)]
)
def test_bfloat16_where_the_cpu_multiplies_it(tmp_path: Path, flags: str, expected: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\nbugs :\n")
    assert multiplies_bfloat16(tmp_path / "cpuinfo") is expected


def test_not_a_number_fails_the_batch_and_leaves_no_trace(config: dict[str, Any]) -> None:
    """Other sequences' blocks are unharmed, and blocks of the failed batch can be used by others."""
    engine = create(config)
    driver = EngineDriver(engine)
    other = driver.add(list(range(40)))
    driver.step([other])
    poisoned = driver.add([5] * 20)
    weight = engine._model._layers[1]._attention_norm
    kept = weight.clone()
    with torch.inference_mode():
        weight.fill_(float("nan"))
    for sample in (True, False):
        with pytest.raises(EngineError, match="not a number"):
            engine.forward(Batch([BatchItem(poisoned, 20, sample)]))
    with torch.inference_mode():
        weight.copy_(kept)
    assert engine._cache.pool.isfinite().all()
    fresh = EngineDriver(create(config))
    expected = fresh.generate([fresh.add(list(range(40))), fresh.add([5] * 20)], 4)
    assert driver.generate([other, poisoned], 4) == expected


@pytest.mark.parametrize("token_id", [-1, 300, 2**40])
def test_a_token_outside_the_vocabulary_is_an_error(config: dict[str, Any], token_id: int) -> None:
    engine = create(config)
    with pytest.raises(EngineError, match="vocabulary"):
        engine.forward(Batch([BatchItem(EngineDriver(engine).add([1, token_id]), 2, True)]))


def test_warm_up_leaves_an_empty_pool(config: dict[str, Any]) -> None:
    for num_blocks in (1, 2, 40):
        engine = create(config, kv_device=num_blocks * create(config).spec.layout.block_bytes)
        engine.warm_up(ignore)
        assert not engine._cache.pool.any()


def test_load_reports_how_far_it_is(config: dict[str, Any]) -> None:
    reports: list[tuple[str, float | None]] = []
    load(EngineConfig(**config), lambda text, fraction: reports.append((text, fraction)))
    fractions = [fraction for text, fraction in reports if text == "loading weights" and fraction is not None]
    assert fractions == sorted(fractions)
    assert len(fractions) == 3


def test_a_machine_without_torch_is_told_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from shared.engine import load; from shared.engine.config import EngineConfig\n"
        "try: load(EngineConfig(), print)\n"
        "except Exception as error: print(type(error).__name__, error.message, error.remedy)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout == "EnvironmentFault the package torch is not installed pip install slipstream[engine]\n"


def test_the_door_does_not_import_torch() -> None:
    code = "import sys, shared.engine, shared.engine.model.loader, shared.engine.simulated; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50).stdout == "False\n"
