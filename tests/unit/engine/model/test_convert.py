"""GGUF files become folders of the same values; what cannot is refused and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shared.engine import torch_engine
from shared.engine.config import EngineConfig
from shared.engine.model import convert, loader
from shared.engine.model.digests import hash_file
from shared.engine.model.loader import resolve_model
from shared.errors import ModelFault
from tests.support.engine_driver import EngineDriver
from tests.support.models import TinyGguf

Q = gguf.GGMLQuantizationType


def ignore(text: str, fraction: float | None) -> None:
    """Reports go nowhere."""


def left_over(cache_dir: Path) -> list[str]:
    """Names in the cache of models, locks aside."""
    return [path.name for path in (cache_dir / "models").glob("*") if path.suffix != ".lock"]


def test_a_gguf_becomes_a_folder_that_transformers_reads(tiny: Path, cache_dir: Path) -> None:
    folder = resolve_model(str(tiny), cache_dir, ignore)
    assert folder.name == "My-Tiny-Model"
    assert folder.path == cache_dir / "models" / hash_file(tiny)
    theirs = AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32)
    engine = torch_engine.load(EngineConfig(model=str(tiny), cache_dir=cache_dir, numerics="exact", kv_device=2**20), ignore)
    driver = EngineDriver(engine)
    sequence = driver.add(list(range(3, 40)))
    driver.generate([sequence], 4)
    for end in range(37, 41):
        with torch.inference_mode():
            assert int(theirs(torch.tensor([sequence.token_ids[:end]])).logits[0, -1].argmax()) == sequence.token_ids[end]


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1])
def test_values_are_dequantised_exactly(tmp_path: Path, cache_dir: Path, kind: gguf.GGMLQuantizationType) -> None:
    """And q and k are put back into the order that transformers has."""
    source = TinyGguf()
    source.types = {name: kind for name, values in source.tensors.items() if values.ndim == 2}
    folder = resolve_model(str(source.write(tmp_path / "tiny.gguf")), cache_dir, ignore)
    converted = load_file(folder.path / "model.safetensors")
    expected = {name: gguf.quants.dequantize(gguf.quants.quantize(v, source.types.get(name, Q.F32)), source.types.get(name, Q.F32))
                for name, v in source.tensors.items()}  # fmt: skip
    assert np.array_equal(converted["model.embed_tokens.weight"].float().numpy(), expected["token_embd.weight"])
    assert np.array_equal(converted["model.layers.1.mlp.down_proj.weight"].float().numpy(), expected["blk.1.ffn_down.weight"])
    key = converted["model.layers.0.self_attn.k_proj.weight"].float().numpy()
    for head in range(2):
        for half in range(2):
            rows = key[head * 16 + half * 8 : head * 16 + half * 8 + 8]
            assert np.array_equal(rows, expected["blk.0.attn_k.weight"][head * 16 + half : head * 16 + 16 : 2])


def test_large_tensors_are_written_in_pieces(tiny: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = resolve_model(str(tiny), cache_dir, ignore)
    monkeypatch.setattr(convert, "ROWS_BYTES", 1000)
    assert resolve_model(str(tiny), tmp_path / "other", ignore).weights_digest == whole.weights_digest


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path, cache_dir: Path) -> None:
    source = TinyGguf()
    source.fields |= {"llama.rope.freq_base": 500_000.0}
    turns = 8192 / (2 * np.pi * 500_000.0 ** (np.arange(0, 16, 2) / 16))
    kept = np.clip((turns - 1) / 3, 0, 1)
    source.tensors["rope_freqs.weight"] = (1 / ((1 - kept) / 32 + kept)).astype(np.float32)
    rope = resolve_model(str(source.write(tmp_path / "three.gguf")), cache_dir, ignore).architecture.rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", 32.0, 8192)
    source.tensors["rope_freqs.weight"][3] += 1
    with pytest.raises(ModelFault, match="rope divisors"):
        resolve_model(str(source.write(tmp_path / "odd.gguf")), cache_dir, ignore)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_qwen_files(tmp_path: Path, cache_dir: Path, architecture: str) -> None:
    """Biases or head norms, a head wider than hidden / heads, nothing permuted, an own output matrix."""
    source = TinyGguf(architecture)
    source.fields |= {f"{architecture}.attention.key_length": 16, "tokenizer.ggml.pre": "qwen2"}
    source.tensors["output.weight"] = source.tensors["token_embd.weight"] * 2
    for layer in range(2):
        extras = (
            {"attn_q.bias": 64, "attn_k.bias": 32, "attn_v.bias": 32}
            if architecture == "qwen2"
            else {"attn_q_norm.weight": 16, "attn_k_norm.weight": 16}
        )
        source.tensors |= {f"blk.{layer}.{name}": np.ones(size, dtype=np.float32) for name, size in extras.items()}
    folder = resolve_model(str(source.write(tmp_path / "q.gguf")), cache_dir, ignore)
    converted = load_file(folder.path / "model.safetensors")
    assert folder.architecture.family == architecture
    assert np.array_equal(converted["model.layers.0.self_attn.q_proj.weight"].numpy(), source.tensors["blk.0.attn_q.weight"])
    assert np.array_equal(converted["lm_head.weight"].numpy(), source.tensors["output.weight"])


def infinite(tiny: TinyGguf) -> None:
    tiny.tensors["blk.1.ffn_up.weight"][3, 4] = np.inf


def not_a_half(tiny: TinyGguf) -> None:
    tiny.tensors["blk.1.ffn_up.weight"][3, 4] = np.nan
    tiny.types["blk.1.ffn_up.weight"] = Q.BF16


BAD_FILES: dict[str, tuple[Callable[[TinyGguf], Any], str]] = {
    "infinite": (infinite, "not numbers"),
    "nan": (not_a_half, "not numbers"),
    "missing tensor": (lambda tiny: tiny.tensors.pop("blk.1.attn_v.weight"), "'blk.1.attn_v.weight' is missing"),
    "wrong shape": (lambda tiny: tiny.tensors.update({"output_norm.weight": np.ones(63, np.float32)}), r"shape \(63,\), not \(64,\)"),
    "unknown tensor": (lambda tiny: tiny.tensors.update({"blk.0.ffn_gate_inp.weight": np.ones(64, np.float32)}), "ffn_gate_inp"),
    "missing field": (lambda tiny: tiny.fields.pop("llama.block_count"), "block_count"),
    "experts": (lambda tiny: tiny.fields.update({"llama.expert_count": 8}), "mixture of experts"),
    "partial rope": (lambda tiny: tiny.fields.update({"llama.rope.dimension_count": 8}), "rope"),
    "yarn": (lambda tiny: tiny.fields.update({"llama.rope.scaling.type": "yarn"}), "'yarn'"),
    "no vocabulary": (lambda tiny: tiny.fields.pop("tokenizer.ggml.tokens"), "no vocabulary"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_gguf_that_cannot_be_served(tmp_path: Path, cache_dir: Path, case: str) -> None:
    change, reason = BAD_FILES[case]
    source = TinyGguf()
    change(source)
    with pytest.raises(ModelFault, match=reason) as fault:
        resolve_model(str(source.write(tmp_path / "bad.gguf")), cache_dir, ignore)
    assert fault.value.remedy
    assert "\n" not in fault.value.message
    assert left_over(cache_dir) == []


def test_an_unknown_architecture_is_named(tmp_path: Path, cache_dir: Path) -> None:
    with pytest.raises(ModelFault, match="'gemma4' is not served") as fault:
        resolve_model(str(TinyGguf("gemma4").write(tmp_path / "g.gguf")), cache_dir, ignore)
    assert "Qwen3" in fault.value.remedy


def test_without_the_gguf_package(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "dequantize", None)
    with pytest.raises(Exception, match="package gguf") as fault:
        resolve_model(str(tiny), cache_dir, ignore)
    assert fault.value.remedy == "pip install slipstream[engine]"
    assert left_over(cache_dir) == []


def test_what_was_converted_serves_without_the_package_that_it_came_from(
    tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = resolve_model(str(tiny), cache_dir, ignore)
    monkeypatch.setitem(loader.KNOWN_MODELS, made.name, loader.Bundle("no-such-distribution", "x.gguf"))
    assert resolve_model(made.name, cache_dir, ignore).weights_digest == made.weights_digest
