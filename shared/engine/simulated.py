"""An engine without torch: timed by a profile, deterministic, and honest about its KV.

The KV of a token is a 64-bit fold of all tokens up to it, so the pool's bytes are a function of the tokens. The next token is drawn from
the KV of the whole sequence *as it lies in the pool*: wrong or foreign blocks give visibly wrong text, as in a real engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as ListLike

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.engine.batch import Batch, BatchItem
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine, EngineSpec, ReportProgress, Sampled
from shared.engine.model.loader import ModelFolder, resolve_model
from shared.engine.sequence import Sequence
from shared.errors import ConfigError, EngineError
from shared.kv.hashing import ModelIdentity
from shared.kv.layout import KvLayout
from shared.types import TokenLogprob

MASK = 2**64 - 1
ELEMENTS = 4
"""uint64 a token in K, and as many in V."""
FIRST_PLAIN_TOKEN = 256
"""Ids below are mostly special tokens: they are drawn never."""
MAX_KNOWN = 4096
"""Sequences whose fold is remembered between steps."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of a step: a·n² + b·n + c for n > 0 prompt tokens, plus d for decoding sequences, plus k for each 1,000 tokens of their
    context. Prompt tokens are all computed tokens of items that compute more than one."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    d: float = 0.0
    k: float = 0.0

    def step_ms(self, num_prompt_tokens: int, num_decoding: int, num_context_tokens: int) -> float:
        prefill = self.a * num_prompt_tokens**2 + self.b * num_prompt_tokens + self.c if num_prompt_tokens else 0.0
        return prefill + (self.d + self.k * num_context_tokens / 1000 if num_decoding else 0.0)


def parse_profile(text: str) -> Profile:
    """`a=0.001,b=0.2,c=1,d=8,k=0.5` → Profile. Raises ConfigError."""
    try:
        pairs = dict(part.split("=", 1) for part in text.split(",") if part)
        profile = msgspec.convert({name.strip(): float(value) for name, value in pairs.items()}, Profile)
    except (ValueError, msgspec.ValidationError) as error:
        raise ConfigError("SS_SIM_PROFILE", text, str(error), remedy="Write for example a=0,b=0.2,c=1,d=8") from error
    known = set(Profile.__struct_fields__)
    if not set(pairs) <= known or not all(value >= 0 and value < 1e6 for value in msgspec.structs.astuple(profile)):
        raise ConfigError("SS_SIM_PROFILE", text, f"takes {', '.join(sorted(known))}, each a number of ms of at least 0")
    return profile


def fold(value: int, token_id: int) -> int:
    """The KV of a token, from that of the token before it (splitmix64's mixing)."""
    value = (value ^ (token_id + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK
    return value ^ value >> 31


class SimulatedEngine(Engine):
    """See the module. `sleep_s` is injected: a simulator with a virtual clock passes its own."""

    def __init__(self, spec: EngineSpec, profile: Profile, sleep_s: Callable[[float], None] = time.sleep) -> None:
        self.spec = spec
        self._profile = profile
        self._sleep_s = sleep_s
        blocks = np.zeros((spec.num_blocks, spec.layout.block_bytes), dtype=np.uint8)
        self._bytes: NDArray[np.uint8] = blocks
        self._kv: NDArray[np.uint64] = blocks.view(np.uint64).reshape(spec.num_blocks, 2, spec.layout.block_size, ELEMENTS)
        self._known: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """By sequence: how many tokens are folded, and the fold."""

    def forward(self, batch: Batch) -> list[Sampled]:
        if not batch.items:
            raise EngineError("an empty batch")
        sampled = [token for item in batch.items if (token := self._compute(item)) is not None]
        step_ms = self._step_ms(batch)
        if step_ms > 0:
            self._sleep_s(step_ms / 1000)
        return sampled

    def export_blocks(self, block_ids: ListLike[int], out: ListLike[memoryview]) -> None:
        for block_id, buffer in zip(block_ids, out, strict=True):
            np.copyto(np.frombuffer(buffer, dtype=np.uint8), self._bytes[block_id])

    def import_blocks(self, block_ids: ListLike[int], data: ListLike[memoryview]) -> None:
        for block_id, buffer in zip(block_ids, data, strict=True):
            np.copyto(self._bytes[block_id], np.frombuffer(buffer, dtype=np.uint8))

    def host_block(self, block_id: int) -> memoryview:
        return memoryview(self._bytes[block_id])

    def warm_up(self, report: ReportProgress) -> None:
        report("simulated", 1.0)
        self._bytes.fill(0)

    def _step_ms(self, batch: Batch) -> float:
        context = [len(sequence.token_ids) for sequence, num_tokens, sample in batch.items if num_tokens == 1 and sample]
        return self._profile.step_ms(batch.num_tokens - len(context), len(context), sum(context))

    def _compute(self, item: BatchItem) -> Sampled | None:
        """Fold the item's tokens into the pool; sample if asked for."""
        sequence, num_tokens, sample = item
        start = sequence.num_computed_tokens
        block_size = self.spec.layout.block_size
        count, value = self._known.pop(sequence.key, (-1, 0))
        if count != start or not self._holds(sequence, start - 1, value):
            value = self._read_back(sequence, start)
        for position in range(start, start + num_tokens):
            value = fold(value, sequence.token_ids[position])
            self._kv[sequence.block_table[position // block_size], :, position % block_size] = value
        self._known[sequence.key] = (start + num_tokens, value)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return self._sample(sequence, value) if sample else None

    def _holds(self, sequence: Sequence, position: int, value: int) -> bool:
        """Whether the pool has `value` for the token at `position`: a sequence that was preempted may have got other blocks. One element
        is looked at: this runs for every token."""
        block_size = self.spec.layout.block_size
        return position < 0 or self._kv.item(sequence.block_table[position // block_size], 0, position % block_size, 0) == value

    def _read_back(self, sequence: Sequence, count: int) -> int:
        """The fold of the first `count` tokens as the pool holds it: right KV gives the right value, anything else another one."""
        if count == 0:
            return 0
        block_size = self.spec.layout.block_size
        table = sequence.block_table[: (count + block_size - 1) // block_size]
        found = self._kv[table].transpose(0, 2, 1, 3).reshape(-1, 2 * ELEMENTS)[:count]
        value = wrong = 0
        for row, token_id in zip(found.tolist(), sequence.token_ids, strict=False):
            value = fold(value, token_id)
            if any(element != value for element in row):
                wrong = fold(wrong, row[0] & 0xFFFFFFFF)
        return value ^ wrong

    def _sample(self, sequence: Sequence, value: int) -> Sampled:
        params = sequence.sampling
        draw = fold(value, params.seed if params.temperature > 0 else 0)
        span = max(self.spec.vocab_size - FIRST_PLAIN_TOKEN, 1)
        token_id = (FIRST_PLAIN_TOKEN + draw % span) % self.spec.vocab_size
        if token_id in self.spec.eos_token_ids:
            token_id = (token_id + 1) % self.spec.vocab_size
        if params.num_logprobs < 0:
            return Sampled(token_id)
        others = [(token_id + step) % self.spec.vocab_size for step in range(params.num_logprobs)]
        return Sampled(token_id, TokenLogprob(-0.5, others, [-0.5 - step for step in range(params.num_logprobs)]))


def load(config: EngineConfig, report: ReportProgress) -> SimulatedEngine:
    """A simulated engine with the tokenizer, vocabulary and context of `config.model`."""
    if config.kv_format != "native":
        raise ConfigError("SS_KV_FORMAT", config.kv_format, "the simulated engine's blocks are exact numbers", remedy="Use native")
    folder = resolve_model(config.model, config.cache_dir, report)
    spec = _spec(config, folder)
    return SimulatedEngine(spec, parse_profile(config.sim_profile))


def _spec(config: EngineConfig, folder: ModelFolder) -> EngineSpec:
    layout = KvLayout(num_layers=1, block_size=config.block_size, num_kv_heads=1, head_dim=2 * ELEMENTS, dtype="float32")
    identity = ModelIdentity(
        architecture="simulated",
        weights_digest=folder.weights_digest,
        tokenizer_digest=folder.tokenizer_digest,
        numerics=config.numerics,
        dtype=layout.dtype,
        lower_tier_format="native",
        layout=layout.digest,
        block_size=config.block_size,
        rope="",
    )
    return EngineSpec(
        model_name=config.model_name or folder.name,
        model_path=str(folder.path),
        model_digest=identity.digest(),
        layout=layout,
        num_blocks=max(min(config.kv_device // layout.block_bytes, 65_536), 1),
        max_model_len=config.max_model_len or folder.max_model_len,
        vocab_size=folder.vocab_size,
        eos_token_ids=folder.eos_token_ids,
        numerics=config.numerics,
        device="sim",
        dtype=layout.dtype,
        weight_format="simulated",
        commits_blocks=True,
    )
