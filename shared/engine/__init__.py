"""The engine: models, attention, sampling, the paged cache; and a simulated engine without torch. Knows nothing of NATS.

`load` and `lower_device` are the doors; only they decide whether torch is imported.
"""

from __future__ import annotations

import importlib
import os

from shared.engine.config import EngineConfig
from shared.engine.engine import Engine, ReportProgress
from shared.errors import EnvironmentFault
from shared.kv.layout import KvLayout
from shared.kv.slot_copy import BlockDevice

__all__ = ["load", "lower_device"]

SPIN_COUNT = "30000"
"""How long an OpenMP thread spins before it sleeps (some 0.1 ms). Without a bound, a machine whose cores are shared by several processes
waits out the scheduler's time slices: measured 30 times slower."""


def load(config: EngineConfig, report: ReportProgress) -> Engine:
    """The engine that `config` asks for. Raises ConfigError, EnvironmentFault (no torch, no GPU) or ModelFault."""
    name = "shared.engine.simulated" if config.device == "sim" else "shared.engine.torch_engine"
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read when torch is loaded
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise EnvironmentFault(f"the package {error.name} is not installed", remedy="pip install slipstream[engine]") from error
    engine: Engine = module.load(config, report)
    return engine


def lower_device(engine: Engine) -> tuple[BlockDevice, KvLayout]:
    """What a worker's KV client copies from and to, and the layout of blocks there: the engine, or a codec before it."""
    spec = engine.spec
    if spec.lower_format == "native":
        return engine, spec.layout
    compress = importlib.import_module("shared.engine.compress")
    device = compress.CompressedDevice(engine, spec.layout, spec.lower_format)
    return device, device.layout
