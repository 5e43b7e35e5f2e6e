"""GGUF → the files of a model folder: config.json, model.safetensors, tokenizer files. Values are dequantised exactly, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.engine.engine import ReportProgress
from shared.engine.model.architecture import FAMILIES, FAMILY_REMEDY, Architecture, Rope, read_architecture
from shared.engine.model.gguf import DAMAGED_REMEDY, GgufFile, GgufTensor
from shared.engine.model.safetensors_file import SafetensorsWriter, StoredTensor
from shared.engine.model.vocabulary import build_tokenizer
from shared.errors import EnvironmentFault, ModelFault

try:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize
except ImportError:  # the extra `engine` is not installed: said when something is to be converted
    dequantize = None

ROWS_BYTES = 32 * 2**20
"""Rows are dequantised in pieces of about this many bytes of float32, so that memory stays small beside the model."""

LLAMA3_DEFAULTS = Rope(kind="llama3")

_GLOBAL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_config(gguf: GgufFile, folder: Path) -> Architecture:
    """Write config.json, tokenizer.json and tokenizer_config.json into `folder`. Raises ModelFault, OSError."""
    source = str(gguf.path)
    config = _config(gguf, source)
    architecture = read_architecture(config, source)
    tokenizer, tokenizer_config = build_tokenizer(gguf.metadata, source)
    if len(tokenizer["model"]["vocab"]) > architecture.vocab_size:
        raise ModelFault(f"{source}: more tokens than rows in the embedding", remedy=DAMAGED_REMEDY)
    for name, content in ("config", config), ("tokenizer", tokenizer), ("tokenizer_config", tokenizer_config):
        text = json.dumps(content, ensure_ascii=False, indent=None if name == "tokenizer" else 2)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return architecture


def write_weights(gguf: GgufFile, architecture: Architecture, path: Path, report: ReportProgress) -> str:
    """Write model.safetensors; returns its sha256. Raises ModelFault, OSError (no room)."""
    if dequantize is None:
        raise EnvironmentFault(
            "the package gguf is not installed, a GGUF file cannot be converted", remedy="pip install slipstream[engine]"
        )
    places = _locate_tensors(gguf, architecture)
    layout = [(name, StoredTensor(_dtype(tensor), tensor.shape)) for name, tensor in places]
    total = sum(stored.num_bytes for _, stored in layout)
    done = 0
    with SafetensorsWriter(path, layout) as writer:
        for (name, tensor), (_, stored) in zip(places, layout, strict=True):
            for values in _pieces(gguf, tensor, _num_permuted_heads(gguf, architecture, name)):
                _check_finite(values, name, str(gguf.path))
                writer.append(values)
            done += stored.num_bytes
            report(f"converting weights ({done / 2**20:.0f} of {total / 2**20:.0f} MiB)", done / total)
        return writer.close()


def num_weight_bytes(gguf: GgufFile) -> int:
    """Bytes that the converted weights take."""
    sizes = {"F16": 2, "BF16": 2}
    return sum(int(np.prod(tensor.shape, dtype=np.int64)) * sizes.get(tensor.type_name, 4) for tensor in gguf.tensors.values())


def _config(gguf: GgufFile, source: str) -> dict[str, Any]:
    """GGUF metadata → the config.json that transformers would write."""
    metadata = gguf.metadata
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise ModelFault(f"{source}: architecture {str(family)[:64]!r} is not served", remedy=FAMILY_REMEDY)
    get = {key.removeprefix(f"{family}."): value for key, value in metadata.items() if key.startswith(f"{family}.")}
    if get.get("expert_count", 0):
        raise ModelFault(f"{source}: a mixture of experts is not served", remedy=FAMILY_REMEDY)
    try:
        heads, hidden = int(get["attention.head_count"]), int(get["embedding_length"])
        head_dim = int(get.get("attention.key_length", hidden // heads))
        if get.get("rope.dimension_count", head_dim) != head_dim or get.get("attention.value_length", head_dim) != head_dim:
            raise ModelFault(f"{source}: rope over a part of the head is not supported", remedy=FAMILY_REMEDY)
        window = get.get("attention.sliding_window", 0)
        model_type = "mistral" if family == "llama" and window else family
        return {
            "architectures": [FAMILIES[model_type]],
            "model_type": model_type,
            "num_hidden_layers": int(get["block_count"]),
            "hidden_size": hidden,
            "intermediate_size": int(get["feed_forward_length"]),
            "num_attention_heads": heads,
            "num_key_value_heads": int(get.get("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": int(get["context_length"]),
            "rms_norm_eps": float(str(np.float32(get["attention.layer_norm_rms_epsilon"]))),
            "rope_theta": float(get.get("rope.freq_base", 10_000.0)),
            "rope_scaling": _rope_scaling(gguf, get, head_dim, source),
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors and family != "qwen2",
            "hidden_act": "silu",
            "torch_dtype": "float32",
            "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": _end_tokens(metadata),
            **({"sliding_window": int(window)} if window else {}),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelFault(f"{source}: a field is missing or wrong: {error}", remedy=DAMAGED_REMEDY) from error


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """End of text, of turn, of message: generation ends at each."""
    named = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in named if isinstance(token, int)))


def _rope_scaling(gguf: GgufFile, get: dict[str, Any], head_dim: int, source: str) -> dict[str, Any] | None:
    kind = get.get("rope.scaling.type", "none")
    if "rope_freqs.weight" in gguf.tensors:
        return _llama3_scaling(gguf, float(get.get("rope.freq_base", 10_000.0)), head_dim, source)
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(get["rope.scaling.factor"])}
    if kind != "none":
        raise ModelFault(f"{source}: rope scaling {str(kind)[:32]!r} is not supported", remedy="Supported are none, linear and llama3")
    return None


def _llama3_scaling(gguf: GgufFile, theta: float, head_dim: int, source: str) -> dict[str, Any]:
    """A GGUF keeps only the divisors that llama3 scaling gives: find the factor, and see that it gives exactly these divisors."""
    divisors = gguf.raw(gguf.tensors["rope_freqs.weight"]).view(np.float32).ravel()
    factor, standard = float(divisors.max()), LLAMA3_DEFAULTS
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    turns = standard.original_max_position / wavelengths
    smooth = np.clip((turns - standard.low_freq_factor) / (standard.high_freq_factor - standard.low_freq_factor), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelFault(f"{source}: its rope divisors are not those of llama3 scaling", remedy="Use the model's safetensors folder")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": standard.low_freq_factor,
        "high_freq_factor": standard.high_freq_factor,
        "original_max_position_embeddings": standard.original_max_position,
    }


def _locate_tensors(gguf: GgufFile, architecture: Architecture) -> list[tuple[str, GgufTensor]]:
    """(name in the folder, place in the GGUF) of everything that the architecture has; anything missing or left over is a fault."""
    found: list[tuple[str, GgufTensor]] = []
    for name, shape in architecture.tensors():
        stored = _gguf_name(name)
        tensor = gguf.tensors.get(stored)
        if tensor is None or tensor.shape != shape:
            has = "is missing" if tensor is None else f"has the shape {tensor.shape}, not {shape}"
            raise ModelFault(f"{gguf.path}: tensor {stored!r} {has}", remedy=DAMAGED_REMEDY)
        found.append((name, tensor))
    unknown = gguf.tensors.keys() - {tensor.name for _, tensor in found} - {"rope_freqs.weight"}
    if unknown:
        raise ModelFault(f"{gguf.path}: tensor {min(unknown)[:64]!r} belongs to no architecture that is served", remedy=FAMILY_REMEDY)
    return found


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.{kind}"


def _dtype(tensor: GgufTensor) -> str:
    """Half-precision values are kept as they are; everything else becomes float32."""
    return tensor.type_name if tensor.type_name in ("F16", "BF16") else "F32"


def _num_permuted_heads(gguf: GgufFile, architecture: Architecture, name: str) -> int:
    """Files of architecture llama store q and k with the two rotary halves of a head interleaved. 0: not permuted."""
    if gguf.metadata["general.architecture"] != "llama":
        return 0
    if ".q_proj." in name:
        return architecture.num_heads
    return architecture.num_kv_heads if ".k_proj." in name else 0


def _pieces(gguf: GgufFile, tensor: GgufTensor, num_permuted_heads: int) -> Iterator[NDArray[Any]]:
    """The tensor's values, some rows at a time. [rows, columns] float32, or float16 / bfloat16 bits."""
    raw = gguf.raw(tensor)
    if num_permuted_heads:
        values = _values(raw.reshape(tensor.shape[0], -1), tensor)
        halves = values.reshape(num_permuted_heads, -1, 2, *values.shape[1:])
        yield halves.swapaxes(1, 2).reshape(values.shape)
        return
    step = max(1, ROWS_BYTES // (4 * tensor.shape[-1]))
    for start in range(0, raw.shape[0], step):
        yield _values(raw[start : start + step], tensor)


def _values(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[Any]:
    if tensor.type_name == "F16":
        return raw.view(np.float16)
    if tensor.type_name == "BF16":
        return raw.view(np.uint16)
    values: NDArray[Any] = dequantize(raw, GGMLQuantizationType(tensor.type_id))
    return values


def _check_finite(values: NDArray[Any], name: str, source: str) -> None:
    finite = (values & 0x7F80 != 0x7F80) if values.dtype == np.uint16 else np.isfinite(values)
    if not finite.all():
        raise ModelFault(f"{source}: tensor {name!r} holds values that are not numbers", remedy=DAMAGED_REMEDY)
