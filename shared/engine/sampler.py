"""Choosing the next tokens: one pass over the batch's logits. Order and meaning of the steps are vLLM's.

bias and ends forbidden → penalties → greedy, or: temperature → min-p → top-k → top-p → one draw. Log probabilities are the model's own,
before any of this.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shared.engine.engine import Sampled
from shared.engine.random import uniform
from shared.engine.sequence import Sequence
from shared.errors import EngineError
from shared.types import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them overflows."""

TOP_P_CANDIDATES = 64
"""How many of the likeliest tokens are looked at first for top-p; if a row's mass is not among them, all are."""

CHUNK = 256
"""Tokens whose probabilities are summed up first when one is drawn: a running sum over the whole vocabulary costs ten times as much."""

NO_TOP_K = 0


class Sampler:
    """Samples a batch. Each row depends on its own logits and sequence only, not on its place or on its neighbours."""

    def __init__(self, eos_token_ids: ListLike[int], vocab_size: int) -> None:
        self._eos_token_ids = list(eos_token_ids)
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, sequences: ListLike[Sequence]) -> list[Sampled]:
        """[S, vocab_size] float32 logits (changed in place), and the sequence of each row → one token each.

        Raises EngineError if a logit is not a number.
        """
        if bool(logits.isnan().any()):
            raise EngineError("the model's output is not a number")
        wanted = [row for row, sequence in enumerate(sequences) if sequence.sampling.num_logprobs >= 0]
        logprobs = logits[wanted].log_softmax(dim=-1) if wanted else None
        self._apply_bias(logits, sequences)
        _apply_penalties(logits, sequences)
        token_ids = logits.argmax(dim=-1)
        drawn = [row for row, sequence in enumerate(sequences) if sequence.sampling.temperature >= GREEDY_BELOW]
        if drawn:
            token_ids[drawn] = _draw(logits[drawn], [sequences[row] for row in drawn])
        chosen = token_ids.tolist()
        if logprobs is None:
            return [Sampled(token_id) for token_id in chosen]
        found = dict(
            zip(wanted, _logprobs(logprobs, [chosen[row] for row in wanted], [sequences[row].sampling for row in wanted]), strict=True)
        )
        return [Sampled(token_id, found.get(row)) for row, token_id in enumerate(chosen)]

    def _apply_bias(self, logits: Tensor, sequences: ListLike[Sequence]) -> None:
        """Add logit_bias; forbid every end of text while there are fewer than min_tokens."""
        rows: list[int] = []
        columns: list[int] = []
        amounts: list[float] = []
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            bias = dict(sampling.logit_bias)
            if sequence.num_output_tokens < sampling.min_tokens:
                ends = sampling.stop_token_ids if sampling.ignore_eos else [*self._eos_token_ids, *sampling.stop_token_ids]
                bias |= dict.fromkeys(ends, -np.inf)
            for token_id, amount in bias.items():
                if 0 <= token_id < self._vocab_size:
                    rows.append(row)
                    columns.append(token_id)
                    amounts.append(amount)
        if rows:
            logits.index_put_((_indexes(rows, logits), _indexes(columns, logits)), logits.new_tensor(amounts), accumulate=True)


def _apply_penalties(logits: Tensor, sequences: ListLike[Sequence]) -> None:
    """Repetition over prompt and output, presence and frequency over output."""
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        if sampling.repetition_penalty != 1.0:
            seen = _indexes(np.unique(sequence.token_ids), logits)
            scores = logits[row, seen]
            logits[row, seen] = torch.where(scores > 0, scores / sampling.repetition_penalty, scores * sampling.repetition_penalty)
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            output, counts = np.unique(sequence.token_ids[sequence.num_prompt_tokens :], return_counts=True)
            penalty = sampling.frequency_penalty * counts + sampling.presence_penalty
            logits[row, _indexes(output, logits)] -= torch.from_numpy(penalty.astype(np.float32)).to(logits.device)


def _draw(logits: Tensor, sequences: ListLike[Sequence]) -> Tensor:
    """[D, vocab_size] → [D] token ids, one uniform number each, keyed by (seed, position)."""
    samplings = [sequence.sampling for sequence in sequences]
    logits = logits / _column([sampling.temperature for sampling in samplings], logits)
    if any(sampling.min_p > 0.0 for sampling in samplings):
        floor = _column([np.log(max(sampling.min_p, np.finfo(np.float64).tiny)) for sampling in samplings], logits)
        logits = logits.masked_fill(logits < logits.amax(dim=-1, keepdim=True) + floor, -torch.inf)
    logits = _keep_top_p(_keep_top_k(logits, samplings), samplings)
    draws = [uniform(sequence.sampling.seed, sequence.num_tokens) for sequence in sequences]
    return _at_height(logits.softmax(dim=-1), torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None])


def _at_height(weights: Tensor, heights: Tensor) -> Tensor:
    """The token at which the running sum of a row passes its height, a fraction of the row's sum. [D, V], [D, 1] float64 → [D]."""
    chunks = F.pad(weights, (0, -weights.shape[-1] % CHUNK)).view(len(weights), -1, CHUNK)
    sums = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    heights = heights * sums[:, -1:]
    chunk = torch.searchsorted(sums, heights, right=True)
    inside = chunks.gather(1, chunk[..., None].expand(-1, -1, CHUNK))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    rest = heights - (sums.gather(1, chunk) - inside[:, -1:])
    # Rounding must lead neither below the chunk nor above it: both ends may be tokens of no mass.
    rest = rest.clamp(min=0.0).minimum(inside[:, -1:] * (1 - 2.0**-52))
    return (chunk * CHUNK + torch.searchsorted(inside, rest, right=True))[:, 0]


def _keep_top_k(logits: Tensor, samplings: ListLike[SamplingParams]) -> Tensor:
    """Everything below the k-th likeliest → -inf; equals of the k-th stay."""
    vocab_size = logits.shape[-1]
    limits = [min(sampling.top_k, vocab_size) if sampling.top_k != NO_TOP_K else vocab_size for sampling in samplings]
    wanted = [row for row, limit in enumerate(limits) if limit < vocab_size]
    if not wanted:
        return logits
    rows = _indexes(wanted, logits)
    largest = logits[rows].topk(max(limits[row] for row in wanted), dim=-1).values
    last = largest.gather(1, _indexes([limits[row] - 1 for row in wanted], logits)[:, None])
    logits[rows] = logits[rows].masked_fill(logits[rows] < last, -torch.inf)
    return logits


def _keep_top_p(logits: Tensor, samplings: ListLike[SamplingParams]) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches top_p; equals of its last stay."""
    wanted = [row for row, sampling in enumerate(samplings) if sampling.top_p < 1.0]
    if not wanted:
        return logits
    rows, mass = _indexes(wanted, logits), _column([samplings[row].top_p for row in wanted], logits)
    scores = logits[rows]
    cut, reached = _cut_of(scores, mass, min(TOP_P_CANDIDATES, scores.shape[-1]))
    if not bool(reached.all()):
        cut, _ = _cut_of(scores, mass, scores.shape[-1])
    logits[rows] = scores.masked_fill(scores < cut, -torch.inf)
    return logits


def _cut_of(scores: Tensor, mass: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """([R, 1] score of the last token within `mass`, [R, 1] whether the candidates hold that mass)."""
    likeliest = _likeliest(scores, num_candidates)
    cumulative = (likeliest - scores.logsumexp(dim=-1, keepdim=True)).exp().cumsum(dim=-1)
    last = (cumulative < mass).sum(dim=-1, keepdim=True)
    return likeliest.gather(1, last.clamp(max=num_candidates - 1)), last < num_candidates


def _likeliest(scores: Tensor, num_candidates: int) -> Tensor:
    """[R, num_candidates] the largest scores, falling. numpy sorts whole rows ten times as fast as torch does on a CPU."""
    if num_candidates == scores.shape[-1] and scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)[:, ::-1].copy())
    return scores.topk(num_candidates, dim=-1).values


def _logprobs(logprobs: Tensor, chosen: ListLike[int], samplings: ListLike[SamplingParams]) -> list[TokenLogprob]:
    """[R, vocab_size] log probabilities → the chosen token's and the likeliest, a row each."""
    own = logprobs.gather(1, _indexes(chosen, logprobs)[:, None])[:, 0].tolist()
    top = logprobs.topk(max(sampling.num_logprobs for sampling in samplings), dim=-1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return [
        TokenLogprob(own[row], ids[row][: sampling.num_logprobs], values[row][: sampling.num_logprobs])
        for row, sampling in enumerate(samplings)
    ]


def _indexes(values: ListLike[int] | NDArray[np.int64], like: Tensor) -> Tensor:
    return torch.as_tensor(np.asarray(values, dtype=np.int64), device=like.device)


def _column(values: ListLike[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device)[:, None]
