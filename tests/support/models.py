"""Tiny random models: one folder a family, made by transformers, which is then the oracle for its forward pass; and tiny GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

VOCAB_SIZE = 300
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral_sliding": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
}
"""Name → (model_type, what differs from SIZES)."""


def tiny_model(family: str, folder: Path) -> transformers.PreTrainedModel:
    """Write a random model of the family into `folder`, with a byte tokenizer; returns transformers' own, in float32."""
    model_type, overrides = FAMILIES[family]
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(len(family) * 1009 + sum(family.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, spread = (1.0, 0.2) if "norm" in name else (0.0, 0.15)
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder, safe_serialization=True)
    write_byte_tokenizer(folder)
    return model


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer of the 256 bytes, behind three special tokens."""
    tokenizer, config = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}, {"eos_token": "<eos>"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class TinyGguf:
    """Writes a small GGUF file; every part may be changed before `write`."""

    def __init__(self, architecture: str = "llama") -> None:
        self.architecture = architecture
        self.fields: dict[str, Any] = {
            f"{architecture}.block_count": 2,
            f"{architecture}.context_length": 256,
            f"{architecture}.embedding_length": 64,
            f"{architecture}.feed_forward_length": 96,
            f"{architecture}.attention.head_count": 4,
            f"{architecture}.attention.head_count_kv": 2,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{architecture}.rope.freq_base": 10_000.0,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *gpt2_alphabet()],
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 256,
            "tokenizer.ggml.merges": ["h e", "l l"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.chat_template": "{{ messages }}",
        }
        self.fields["tokenizer.ggml.tokens"] += ["he", "ll"]
        self.fields["tokenizer.ggml.token_type"] += [1, 1]
        random = np.random.default_rng(5)
        shapes = {"token_embd.weight": (261, 64), "output_norm.weight": (64,)}
        for layer in range(2):
            parts = {
                "attn_norm": (64,),
                "attn_q": (64, 64),
                "attn_k": (32, 64),
                "attn_v": (32, 64),
                "attn_output": (64, 64),
                "ffn_norm": (64,),
                "ffn_gate": (96, 64),
                "ffn_up": (96, 64),
                "ffn_down": (64, 96),
            }
            shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
        self.tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        self.types: dict[str, gguf.GGMLQuantizationType] = {}
        """Tensor name → storage type; F32 where none is given."""

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture)
        for key, value in self.fields.items():
            _add_field(writer, key, value)
        for name, values in self.tensors.items():
            kind = self.types.get(name, gguf.GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def gpt2_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level vocabularies, in the order of the bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
