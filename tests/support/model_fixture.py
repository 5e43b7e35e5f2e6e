"""The bundled model, converted: once a machine, in the user's cache, as a worker would."""

from __future__ import annotations

import pytest

from shared.engine.config import EngineConfig
from shared.engine.model.loader import ModelFolder, resolve_model

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def smollm2_folder() -> ModelFolder:
    """SmolLM2-135M-Instruct with tokenizer.json and float32 weights."""
    return resolve_model(MODEL, EngineConfig().cache_dir, lambda text, fraction: None)
