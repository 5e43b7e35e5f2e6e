"""What similarity says about one request: which blocks are not known yet, and will be there soon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.router.load import Pool
from services.router.similarity import Neighbour
from services.router.sketch import Sketch

Blocks = NDArray[np.int32]
"""[num_workers] Leading blocks of a prompt at each worker of a pool."""


class Hint(NamedTuple):
    """Without sketches it was not asked: little stayed uncovered, or too little of the prompt is its own."""

    sketches: Sequence[Sketch] = ()
    version: int = 0
    neighbour: Neighbour | None = None

    def expected_at(self, pool: Pool) -> Blocks | None:
        """What the neighbour's decode worker is about to hold; None: nothing is known to come."""
        row = pool.row.get(self.neighbour.prompt.decode_worker) if self.neighbour is not None else None
        return self._blocks_at(row, pool)

    def under_way_at(self, pool: Pool) -> Blocks | None:
        """What the neighbour's prefill worker computes at this moment: who comes there next need not compute it again."""
        if self.neighbour is None or self.neighbour.prompt.prefill_worker is None:
            return None
        row = pool.row.get(self.neighbour.prompt.prefill_worker)
        is_there = row is not None and self.neighbour.prompt.key in pool.states[row].bookings
        return self._blocks_at(row if is_there else None, pool)

    def _blocks_at(self, row: int | None, pool: Pool) -> Blocks | None:
        if self.neighbour is None or row is None:
            return None
        blocks = np.zeros(len(pool.states), dtype=np.int32)
        blocks[row] = self.neighbour.num_blocks
        return blocks


NO_HINT = Hint()
