"""Logits of 16-bit models: what is rounded, and what is not."""

from __future__ import annotations

import pytest
import torch

from shared.engine.model.head import NUM_SHARP, Head

VOCAB_SIZE, HIDDEN_SIZE = 500, 64


def exact(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (hidden.double() @ weight.double().T).float()


def random(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden, weight = (torch.randn(rows, HIDDEN_SIZE, generator=generator).to(dtype) for rows in (7, VOCAB_SIZE))
    return hidden, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_are_exact_and_all_are_near(dtype: torch.dtype) -> None:
    hidden, weight = random(dtype)
    logits, expected = Head(weight)(hidden), exact(hidden, weight)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=2**-7, atol=2**-4)
    likeliest = expected.topk(NUM_SHARP // 2).indices
    assert torch.equal(logits.topk(NUM_SHARP // 2).indices, likeliest)
    torch.testing.assert_close(logits.gather(1, likeliest), expected.gather(1, likeliest), rtol=1e-5, atol=1e-5)


def test_what_bfloat16_would_call_equal_is_not() -> None:
    """The better of two logits that round to the same stands later in the vocabulary."""
    hidden = torch.ones(1, HIDDEN_SIZE, dtype=torch.bfloat16)
    weight = torch.zeros(VOCAB_SIZE, HIDDEN_SIZE, dtype=torch.bfloat16)
    weight[[3, 400], 0] = 25
    weight[400, 1] = 2**-5
    assert len(set((hidden @ weight[[3, 400]].T).flatten().tolist())) == 1
    assert Head(weight)(hidden).argmax().item() == 400


def test_a_vocabulary_smaller_than_what_is_sharpened() -> None:
    hidden, weight = random(torch.bfloat16)
    torch.testing.assert_close(Head(weight[:3])(hidden), exact(hidden, weight[:3]), rtol=1e-5, atol=1e-5)
