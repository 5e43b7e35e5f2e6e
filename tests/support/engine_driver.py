"""The smallest scheduler that serves sequences with an engine: for tests of engines."""

from __future__ import annotations

import itertools

from shared.engine.batch import Batch, BatchItem
from shared.engine.engine import Engine, Sampled
from shared.engine.sequence import Sequence
from shared.types import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class EngineDriver:
    """Gives every sequence its blocks at once and never takes them back, unless `reset`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._numbers = itertools.count()
        self.reset()

    def reset(self) -> None:
        self._free = list(range(self.engine.spec.num_blocks))[::-1]

    def add(self, token_ids: list[int], *, room: int = 16, sampling: SamplingParams = GREEDY, cached: Sequence | None = None) -> Sequence:
        """A sequence with blocks for `room` more tokens. `cached`: its whole blocks are shared, as a prefix cache would."""
        size = self.engine.spec.layout.block_size
        table: list[int] = []
        if cached is not None:
            num_shared = 0
            while (num_shared + 1) * size < len(token_ids) and token_ids[: (num_shared + 1) * size] == cached.token_ids[
                : (num_shared + 1) * size
            ]:
                num_shared += 1
            table = cached.block_table[:num_shared]
        sequence = Sequence(
            f"test-{next(self._numbers)}",
            list(token_ids),
            len(token_ids),
            sampling,
            num_computed_tokens=len(table) * size,
            block_table=table,
        )
        while len(table) * size < len(token_ids) + room:
            table.append(self._free.pop())
        return sequence

    def step(self, sequences: list[Sequence], chunk: int = 10**9) -> list[Sampled]:
        """One forward of all, at most `chunk` tokens each; commits the results."""
        items = []
        for sequence in sequences:
            num_tokens = min(chunk, sequence.num_uncomputed_tokens)
            items.append(BatchItem(sequence, num_tokens, sample=num_tokens == sequence.num_uncomputed_tokens))
        sampled = self.engine.forward(Batch(items))
        results = iter(sampled)
        for sequence, num_tokens, sample in items:
            sequence.num_computed_tokens += num_tokens
            if sample:
                sequence.token_ids.append(next(results).token_id)
        return sampled

    def generate(self, sequences: list[Sequence], num_tokens: int, chunk: int = 10**9) -> list[list[int]]:
        """`num_tokens` new tokens for each, together; sequences that are done leave the batch."""
        while running := [sequence for sequence in sequences if sequence.num_output_tokens < num_tokens]:
            self.step(running, chunk)
        return [sequence.token_ids[sequence.num_prompt_tokens :] for sequence in sequences]
