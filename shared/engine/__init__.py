"""The engine: models, attention, sampling, the paged cache; and a simulated engine without torch. Knows nothing of NATS.

`load(config)` is the one door; only it decides whether torch is imported.
"""

from __future__ import annotations

import importlib
import os

from shared.engine.config import EngineConfig
from shared.engine.engine import Engine, ReportProgress
from shared.errors import EnvironmentFault

__all__ = ["load"]

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
