"""What config.json says, as the native forward needs it: sizes, rope, and the tensors that must be there. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from shared.errors import ModelFault

FAMILIES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""model_type → the class that config.json names: the families with a native forward."""

DEFAULT_WINDOW, DEFAULT_FIRST_SLIDING_LAYER = 4096, 28
"""What transformers assumes where config.json says nothing."""

FAMILY_REMEDY = "Use a model of the families Llama, Mistral, Qwen2, Qwen3 (SmolLM2 is a Llama)"


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding. `llama3` divides the low frequencies by `factor` and blends in between; `linear` divides all."""

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder of the Llama family."""

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: Rope
    ties_embeddings: bool
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    sliding_window: int = 0
    """Tokens a token attends to, itself included; 0: all."""
    sliding_layers: tuple[int, ...] = ()
    """Layers with the sliding window."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name in the safetensors file, shape) of every tensor that the forward reads."""
        yield "model.embed_tokens.weight", (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            yield from ((f"model.layers.{layer}.{name}", shape) for name, shape in self._layer_tensors())
        yield "model.norm.weight", (self.hidden_size,)
        if not self.ties_embeddings:
            yield "lm_head.weight", (self.vocab_size, self.hidden_size)

    def _layer_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        yield "input_layernorm.weight", (hidden,)
        for name, size in (("q", self.query_size), ("k", self.kv_size), ("v", self.kv_size)):
            yield f"self_attn.{name}_proj.weight", (size, hidden)
            if self.has_qkv_bias:
                yield f"self_attn.{name}_proj.bias", (size,)
        if self.has_qk_norm:
            yield "self_attn.q_norm.weight", (self.head_dim,)
            yield "self_attn.k_norm.weight", (self.head_dim,)
        yield "self_attn.o_proj.weight", (hidden, self.query_size)
        if self.has_output_bias:
            yield "self_attn.o_proj.bias", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"mlp.{name}_proj.weight", (rows, columns)
            if self.has_mlp_bias:
                yield f"mlp.{name}_proj.bias", (rows,)


def read_architecture(config: dict[str, Any], source: str) -> Architecture:
    """config.json → Architecture. Raises ModelFault, naming `source`, for what the native forward does not do."""
    family = _family(config, source)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelFault(f"{source}: activation {config['hidden_act']!r} is not supported", remedy=FAMILY_REMEDY)
    try:
        sizes = _sizes(config)
        rope = _rope(config, source)
    except (KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ModelFault(f"{source}: config.json is not usable: {error}", remedy="Fetch the model's folder again") from error
    if min(sizes[name] for name in ("num_layers", "hidden_size", "intermediate_size", "num_kv_heads", "head_dim", "vocab_size")) < 1:
        raise ModelFault(f"{source}: config.json has a size below 1", remedy="Fetch the model's folder again")
    if sizes["num_heads"] % sizes["num_kv_heads"] or sizes["head_dim"] % 2:
        raise ModelFault(f"{source}: {sizes['num_heads']} heads over {sizes['num_kv_heads']} KV heads", remedy=FAMILY_REMEDY)
    attention_bias = bool(config.get("attention_bias", False))
    sliding_window, sliding_layers = _sliding(config, family, sizes["num_layers"])
    return Architecture(
        family=family,
        rope=rope,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        ties_embeddings=bool(config.get("tie_word_embeddings", False)),
        has_qkv_bias=family == "qwen2" or attention_bias,
        has_output_bias=family != "qwen2" and attention_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        sliding_window=sliding_window,
        sliding_layers=sliding_layers,
        **sizes,
    )


def _family(config: dict[str, Any], source: str) -> str:
    family = config.get("model_type", "")
    classes = config.get("architectures") or []
    if family not in FAMILIES or classes not in ([], [FAMILIES[family]]):
        named = classes[0] if classes else family or "none named"
        raise ModelFault(f"{source}: architecture {str(named)[:64]!r} is not served", remedy=FAMILY_REMEDY)
    return str(family)


def _sizes(config: dict[str, Any]) -> dict[str, int]:
    num_heads, hidden_size = int(config["num_attention_heads"]), int(config["hidden_size"])
    return {
        "num_layers": int(config["num_hidden_layers"]),
        "hidden_size": hidden_size,
        "intermediate_size": int(config["intermediate_size"]),
        "num_heads": num_heads,
        "num_kv_heads": int(config.get("num_key_value_heads") or num_heads),
        "head_dim": int(config.get("head_dim") or hidden_size // num_heads),
        "vocab_size": int(config["vocab_size"]),
        "max_position": int(config["max_position_embeddings"]),
    }


def _rope(config: dict[str, Any], source: str) -> Rope:
    """transformers 5 writes rope_parameters; before, rope_theta stood at the top and rope_scaling beside it."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = fields.get("rope_type", fields.get("type", "default"))
    rotary_part = fields.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if kind not in ("default", "linear", "llama3") or float(rotary_part) != 1.0:
        raise ModelFault(
            f"{source}: rope of type {kind!r} is not supported", remedy="Supported: default, linear, llama3, over the whole head"
        )
    theta = float(fields.get("rope_theta", config.get("rope_theta", 10_000.0)))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind="linear", factor=float(fields["factor"]))
    return Rope(
        theta=theta,
        kind="llama3",
        factor=float(fields["factor"]),
        low_freq_factor=float(fields["low_freq_factor"]),
        high_freq_factor=float(fields["high_freq_factor"]),
        original_max_position=int(fields["original_max_position_embeddings"]),
    )


def _sliding(config: dict[str, Any], family: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """The window and its layers. Qwen has a window only if use_sliding_window says so, and only from max_window_layers on."""
    window = config.get("sliding_window", DEFAULT_WINDOW)
    if not window or family == "llama" or (family != "mistral" and not config.get("use_sliding_window", False)):
        return 0, ()
    if family == "mistral":
        return int(window), tuple(range(num_layers))
    if config.get("layer_types"):
        return int(window), tuple(layer for layer, kind in enumerate(config["layer_types"]) if kind == "sliding_attention")
    return int(window), tuple(range(int(config.get("max_window_layers", DEFAULT_FIRST_SLIDING_LAYER)), num_layers))
