"""The Llama family: Llama 2/3/3.x, SmolLM2, Mistral, Qwen2/2.5, Qwen3. q, k and v are one product, gate and up are one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.engine.attention.base import AttentionBackend, AttentionShape
from shared.engine.engine import ReportProgress
from shared.engine.model.architecture import Architecture
from shared.engine.model.base import Model
from shared.engine.model.head import Head
from shared.engine.model.linear import Linear, create_linear
from shared.engine.model.rope import Rotation, inverse_frequencies
from shared.engine.model.weights import WeightReader


class LlamaLayer:
    """Attention and a gated feed-forward network, each behind a norm and added to its input."""

    def __init__(self, reader: WeightReader, architecture: Architecture, index: int) -> None:
        prefix = f"model.layers.{index}"
        self._architecture, self._index = architecture, index
        self._attention_norm = reader.tensor(f"{prefix}.input_layernorm.weight")
        self._feed_forward_norm = reader.tensor(f"{prefix}.post_attention_layernorm.weight")
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        self._qkv = _linear(reader, qkv, has_bias=architecture.has_qkv_bias)
        self._output = _linear(reader, [f"{prefix}.self_attn.o_proj"], has_bias=architecture.has_output_bias)
        self._gate_up = _linear(reader, [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], has_bias=architecture.has_mlp_bias)
        self._down = _linear(reader, [f"{prefix}.mlp.down_proj"], has_bias=architecture.has_mlp_bias)
        self._query_norm = reader.tensor(f"{prefix}.self_attn.q_norm.weight") if architecture.has_qk_norm else None
        self._key_norm = reader.tensor(f"{prefix}.self_attn.k_norm.weight") if architecture.has_qk_norm else None

    def __call__(self, x: Tensor, rotation: Rotation, attention: AttentionBackend) -> Tensor:
        """[N, hidden_size] → the same."""
        x = x + self._attend(self._norm(x, self._attention_norm), rotation, attention)
        return x + self._feed_forward(self._norm(x, self._feed_forward_norm))

    def _attend(self, x: Tensor, rotation: Rotation, attention: AttentionBackend) -> Tensor:
        num_heads, num_kv_heads = self._architecture.num_heads, self._architecture.num_kv_heads
        heads = self._qkv(x).view(len(x), num_heads + 2 * num_kv_heads, self._architecture.head_dim)
        rotated, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            query, key = rotated[:, :num_heads], rotated[:, num_heads:]
            rotated = torch.cat((self._norm(query, self._query_norm), self._norm(key, self._key_norm)), dim=1)
        rotated = rotation.apply(rotated)
        return self._output(attention.run(self._index, rotated[:, :num_heads], rotated[:, num_heads:], value))

    def _feed_forward(self, x: Tensor) -> Tensor:
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._architecture.norm_eps)


class LlamaModel(Model):
    """Embedding, layers, last norm, head."""

    def __init__(self, reader: WeightReader, architecture: Architecture, report: ReportProgress) -> None:
        self._architecture = architecture
        self._embedding = reader.tensor("model.embed_tokens.weight")
        self._layers: list[LlamaLayer] = []
        for index in range(architecture.num_layers):
            report("loading weights", index / architecture.num_layers)
            self._layers.append(LlamaLayer(reader, architecture, index))
        self._last_norm = reader.tensor("model.norm.weight")
        self._head = Head(self._embedding if architecture.ties_embeddings else reader.tensor("lm_head.weight"))
        self._inverse_frequencies = inverse_frequencies(architecture.rope, architecture.head_dim).to(self._embedding.device)
        window, sliding = architecture.sliding_window, frozenset(architecture.sliding_layers)
        self.attention_shape = AttentionShape(
            num_heads=architecture.num_heads,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            scale=architecture.head_dim**-0.5,
            windows=tuple(window if layer in sliding else 0 for layer in range(architecture.num_layers)),
        )

    def forward(self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        x = F.embedding(input_ids, self._embedding)
        rotation = Rotation(self._inverse_frequencies, positions, x.dtype)
        for layer in self._layers:
            x = layer(x, rotation, attention)
        return F.rms_norm(x, self._last_norm.shape, self._last_norm, self._architecture.norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)


def _linear(reader: WeightReader, names: list[str], *, has_bias: bool) -> Linear:
    bias = reader.joined(*(f"{name}.bias" for name in names)) if has_bias else None
    return create_linear(reader.joined(*(f"{name}.weight" for name in names)), bias)
