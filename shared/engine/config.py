"""Settings of an engine, part of the prefill and decode services' configs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from shared.config import Bytes
from shared.kv.layout import LowerFormat
from shared.types import Numerics


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Each field is set by `SS_<FIELD>`."""

    model: str = "smollm2-135m"
    """A known name, a .gguf file, or a folder with config.json and safetensors."""
    model_name: str = ""
    """The name clients use; empty: derived from `model`."""
    device: Literal["cpu", "cuda", "sim"] = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 with numerics exact; else bfloat16 on a GPU and where the CPU multiplies it in hardware (AMX, AVX512-BF16); else
    float32."""
    numerics: Numerics = "default"
    block_size: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    max_model_len: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """0: the model's own."""
    kv_device: Bytes = 256 * 2**20
    """Bytes of the device pool."""
    kv_format: LowerFormat = "native"
    """How the lower tiers keep blocks: int8 and fp8 halve bfloat16's bytes and may change text, so native is the default."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """CPU threads; 0: all of this process's."""
    cache_dir: Path = Path("~/.cache/slipstream").expanduser()
    """Converted weights."""
    sim_profile: str = "a=0,b=0.0,c=0.0,d=0.0"
    """Simulated engine: prefill ms = a·n² + b·n + c for n prompt tokens in a step; a decode step adds d ms (see simulated.py)."""
    attention: Literal["auto", "reference", "cpu", "flashinfer"] = "auto"
