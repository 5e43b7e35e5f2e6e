"""The engine on torch: a model, its paged pool, an attention backend and a sampler."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from pathlib import Path

import msgspec
import torch

from shared.engine.attention import create_attention
from shared.engine.batch import AttentionPlan, Batch, BatchItem
from shared.engine.config import EngineConfig
from shared.engine.engine import Engine, EngineSpec, ReportProgress, Sampled
from shared.engine.model.base import Model
from shared.engine.model.llama import LlamaModel
from shared.engine.model.loader import ModelFolder, resolve_model
from shared.engine.model.weights import WeightReader
from shared.engine.paged_cache import TORCH_DTYPES, PagedKvCache
from shared.engine.sampler import Sampler
from shared.engine.sequence import Sequence
from shared.errors import ConfigError, EngineError, EnvironmentFault
from shared.kv.hashing import ModelIdentity
from shared.kv.layout import KvLayout, LowerFormat
from shared.types import SamplingParams

WARM_UP_TOKENS = (1, 1, 64)
"""New tokens of the sequences that warm up together: two that decode, one that prefills."""


class TorchEngine(Engine):
    """See Engine. One instance per process: it sets torch's thread count."""

    def __init__(self, spec: EngineSpec, model: Model, cache: PagedKvCache, attention: str) -> None:
        self.spec = spec
        self._model = model
        self._cache = cache
        self._attention = create_attention(attention, model.attention_shape, cache)
        self._sampler = Sampler(spec.eos_token_ids, spec.vocab_size)
        self._device = cache.pool.device

    def forward(self, batch: Batch) -> list[Sampled]:
        if not batch.items:
            raise EngineError("an empty batch")
        plan = batch.plan(self.spec.layout.block_size)
        try:
            with torch.inference_mode():
                return self._step(batch, plan)
        except (RuntimeError, IndexError) as error:  # torch has no error tree of its own: out of memory, a kernel that failed
            self._cache.scrub(plan.slots)
            raise EngineError(f"the forward pass failed: {type(error).__name__}") from error
        except EngineError:
            self._cache.scrub(plan.slots)
            raise

    def _step(self, batch: Batch, plan: AttentionPlan) -> list[Sampled]:
        input_ids = batch.input_ids()
        if input_ids.min() < 0 or input_ids.max() >= self.spec.vocab_size:
            raise EngineError("a token id outside the vocabulary")
        self._attention.plan(plan)
        ids, positions = (torch.from_numpy(values).to(self._device) for values in (input_ids, plan.positions))
        hidden = self._model.forward(ids, positions, self._attention)
        if not bool(hidden.isfinite().all()):
            raise EngineError("the model's output is not a number")
        sampled = [(row - 1, item.sequence) for row, item in zip(plan.qo_indptr[1:].tolist(), batch.items, strict=True) if item.sample]
        if not sampled:
            return []
        rows = torch.tensor([row for row, _ in sampled], device=self._device)
        return self._sampler.sample(self._model.logits(hidden[rows]), [sequence for _, sequence in sampled])

    def score(self, item: BatchItem) -> tuple[list[float], list[int]]:
        """Compute one item's tokens into the pool and judge them: (log probability of the token that follows each computed one, likeliest
        token at each), for every computed token that has a successor in the sequence."""
        sequence, start = item.sequence, item.sequence.num_computed_tokens
        batch = Batch([item])
        plan = batch.plan(self.spec.layout.block_size)
        with torch.inference_mode():
            self._attention.plan(plan)
            ids, positions = (torch.from_numpy(values).to(self._device) for values in (batch.input_ids(), plan.positions))
            hidden = self._model.forward(ids, positions, self._attention)
            following = torch.tensor(sequence.token_ids[start + 1 : start + item.num_tokens + 1], device=self._device)
            logprobs = self._model.logits(hidden[: len(following)]).log_softmax(dim=-1)
            chosen = logprobs.gather(1, following[:, None])[:, 0]
            return chosen.tolist(), logprobs.argmax(dim=-1).tolist()

    def export_blocks(self, block_ids: ListLike[int], out: ListLike[memoryview]) -> None:
        self._cache.export_blocks(block_ids, out)

    def import_blocks(self, block_ids: ListLike[int], data: ListLike[memoryview]) -> None:
        self._cache.import_blocks(block_ids, data)

    def host_block(self, block_id: int) -> memoryview | None:
        return self._cache.host_block(block_id)

    def warm_up(self, report: ReportProgress) -> None:
        report("warming up", None)
        size = self.spec.layout.block_size
        items, first_block = [], 0
        for num_tokens in WARM_UP_TOKENS:
            num_blocks = -(-num_tokens // size)
            if first_block + num_blocks > self.spec.num_blocks or num_tokens > self.spec.max_model_len:
                continue
            table = list(range(first_block, first_block + num_blocks))
            sequence = Sequence("warm-up", [0] * num_tokens, num_tokens, SamplingParams(temperature=0.0), block_table=table)
            items.append(BatchItem(sequence, num_tokens, sample=True))
            first_block += num_blocks
        for count in range(1, len(items) + 1):
            self.forward(Batch(items[:count]))
        self._cache.pool.zero_()

    def close(self) -> None:
        self._cache.free()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def load(config: EngineConfig, report: ReportProgress) -> TorchEngine:
    """Load the model that `config` names. Raises ConfigError, EnvironmentFault, ModelFault."""
    device = _device(config)
    dtype = _dtype(config, device)
    if config.threads:
        torch.set_num_threads(config.threads)
    folder = resolve_model(config.model, config.cache_dir, report)
    spec = _spec(config, folder, device, dtype)
    reader = WeightReader(folder, TORCH_DTYPES[dtype], device)
    with torch.inference_mode():
        model = LlamaModel(reader, folder.architecture, report)
    return TorchEngine(spec, model, PagedKvCache(spec.layout, spec.num_blocks, device), config.attention)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise EnvironmentFault(f"--device cuda: {built}", remedy="Install a CUDA build of torch and the driver, or use --device cpu")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> str:
    """The type that weights are multiplied in and KV is kept in."""
    if config.numerics == "exact":
        if config.dtype not in ("auto", "float32"):
            raise ConfigError(
                "SS_DTYPE", config.dtype, "numerics exact means float32", remedy="Leave --dtype away, or use --numerics default"
            )
        return "float32"
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if device.type == "cuda" or multiplies_bfloat16(Path("/proc/cpuinfo")) else "float32"


def multiplies_bfloat16(cpuinfo: Path) -> bool:
    """Whether this CPU has instructions for bfloat16 products: elsewhere float32 is both faster and more exact."""
    words = cpuinfo.read_text(encoding="ascii", errors="replace").split()
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(words)


def _spec(config: EngineConfig, folder: ModelFolder, device: torch.device, dtype: str) -> EngineSpec:
    architecture = folder.architecture
    layout = KvLayout(
        num_layers=architecture.num_layers,
        block_size=config.block_size,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        dtype=dtype,
    )
    num_blocks = config.kv_device // layout.block_bytes
    return EngineSpec(
        model_name=config.model_name or folder.name,
        model_path=str(folder.path),
        model_digest=_identity(config, folder, layout).digest(),
        layout=layout,
        num_blocks=num_blocks,
        max_model_len=_max_model_len(config, folder.max_model_len, num_blocks),
        vocab_size=architecture.vocab_size,
        eos_token_ids=folder.eos_token_ids,
        numerics=config.numerics,
        device=device.type,
        dtype=dtype,
        weight_format=dtype,
        lower_format=_lower_format(config),
        commits_blocks=True,
    )


def _max_model_len(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """The model's own context, or the configured one; never more than the pool can hold for a single sequence."""
    if config.max_model_len > model_limit:
        raise ConfigError("SS_MAX_MODEL_LEN", config.max_model_len, f"the model's context is {model_limit} tokens")
    room = num_blocks * config.block_size
    if room < max(config.max_model_len, 2):
        raise ConfigError(
            "SS_KV_DEVICE", config.kv_device, f"holds {room} tokens, fewer than one sequence needs", remedy="Give the pool more memory"
        )
    return config.max_model_len or min(model_limit, room)


def _lower_format(config: EngineConfig) -> LowerFormat:
    if config.numerics == "exact" and config.kv_format != "native":
        raise ConfigError(
            "SS_KV_FORMAT", config.kv_format, "numerics exact keeps blocks as they are", remedy="Use native, or numerics default"
        )
    return config.kv_format


def _identity(config: EngineConfig, folder: ModelFolder, layout: KvLayout) -> ModelIdentity:
    return ModelIdentity(
        architecture=msgspec.json.encode(folder.architecture).decode(),
        weights_digest=folder.weights_digest,
        tokenizer_digest=folder.tokenizer_digest,
        numerics=config.numerics,
        dtype=layout.dtype,
        lower_tier_format=config.kv_format,
        layout=layout.digest,
        block_size=layout.block_size,
        rope=msgspec.json.encode(folder.architecture.rope).decode(),
    )
