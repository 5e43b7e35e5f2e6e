"""Every family's forward pass against transformers' on the same random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine import torch_engine
from shared.engine.config import EngineConfig
from shared.engine.engine import Sampled
from shared.engine.model.architecture import Rope
from shared.engine.model.rope import inverse_frequencies
from tests.support.engine_driver import EngineDriver
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model

PROMPT = torch.randint(VOCAB_SIZE, (150,), generator=torch.Generator().manual_seed(3)).tolist()


class CapturedLogits:
    """Stands in for the sampler: keeps the logits, takes the likeliest."""

    def __init__(self, engine: torch_engine.TorchEngine) -> None:
        self._sampler = engine._sampler
        self.rows: list[torch.Tensor] = []
        engine._sampler = self

    def sample(self, logits: torch.Tensor, sequences: Sequence[object]) -> list[Sampled]:
        self.rows += list(logits.clone())
        return self._sampler.sample(logits, sequences)


def load(folder: Path, cache_dir: Path, **changes: Any) -> torch_engine.TorchEngine:
    config = EngineConfig(model=str(folder), cache_dir=cache_dir, kv_device=2**22, threads=1, **changes)
    return torch_engine.load(config, lambda text, fraction: None)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """After a whole prefill, after a prefill in chunks, and for each decoded token; other sequences in the same batch."""
    theirs = tiny_model(family, tmp_path / "model")
    engine = load(tmp_path / "model", tmp_path / "cache", numerics="exact")
    driver, captured = EngineDriver(engine), CapturedLogits(engine)
    for prompts, chunk in (([PROMPT], 10**9), ([PROMPT, PROMPT[:37], PROMPT[5:6]], 21)):
        driver.reset()
        captured.rows.clear()
        sequences = [driver.add(prompt) for prompt in prompts]
        order = []
        while sequences[0].num_output_tokens < 5:
            order += [
                (sequence, sequence.num_tokens)
                for sequence in sequences
                if min(chunk, sequence.num_uncomputed_tokens) == sequence.num_uncomputed_tokens
            ]
            driver.step(sequences, chunk)
        with torch.inference_mode():
            logits = {id(sequence): theirs(torch.tensor([sequence.token_ids])).logits[0] for sequence in sequences}
        assert len(captured.rows) == len(order) >= 5
        for row, (sequence, num_tokens) in zip(captured.rows, order, strict=True):
            torch.testing.assert_close(row, logits[id(sequence)][num_tokens - 1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["smollm2", "qwen2", "qwen3"])
def test_bfloat16_within_its_tolerance(family: str, tmp_path: Path) -> None:
    theirs = tiny_model(family, tmp_path / "model")
    engine = load(tmp_path / "model", tmp_path / "cache", dtype="bfloat16")
    assert engine.spec.dtype == engine.spec.layout.dtype == "bfloat16"
    driver, captured = EngineDriver(engine), CapturedLogits(engine)
    driver.step([driver.add(PROMPT)])
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0, -1]
    assert captured.rows[0].dtype == torch.float32
    torch.testing.assert_close(captured.rows[0], expected, atol=0.05 * float(expected.abs().max()), rtol=0)


def test_llama3_rope_keeps_high_frequencies_and_stretches_low_ones() -> None:
    rope = Rope(theta=500_000.0, kind="llama3", factor=8.0, original_max_position=8192)
    plain = inverse_frequencies(Rope(theta=500_000.0), 128)
    stretched = inverse_frequencies(rope, 128)
    assert torch.equal(stretched[:20], plain[:20])
    torch.testing.assert_close(stretched[-20:], plain[-20:] / 8)
    assert (stretched <= plain).all()
