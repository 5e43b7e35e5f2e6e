"""A decision in words: what a caller is told that asks why its request went where it went."""

from __future__ import annotations

from collections.abc import Callable

from services.router.decide import Decision
from services.router.score import Weights
from shared.types import InstanceId

MAX_CHARS = 2048


def explanation(decision: Decision, name_of: Callable[[InstanceId], str]) -> str:
    """One line of ASCII: the way and the reason; what was found; the best candidates, the chosen one marked, the lowest score first."""
    workers = [worker for worker in (decision.prefill_worker, decision.decode_worker) if worker is not None]
    parts = [
        " -> ".join(map(name_of, workers)) + f" ({decision.reason})",
        f"overlap {decision.num_overlap_tokens} tokens, to compute {decision.num_uncached_tokens}",
    ]
    if decision.num_known_blocks > decision.num_overlap_blocks:
        parts.append(f"elsewhere {decision.num_known_blocks} blocks are known")
    if decision.hint.neighbour is not None:
        parts.append(f"a similar prompt has {decision.hint.neighbour.num_blocks} blocks")
    for candidate in decision.candidates:
        mark = "*" if candidate.worker == decision.decode_worker else ""
        features = " ".join(f"{name}={value:g}" for name, value in zip(Weights.__struct_fields__, candidate.features, strict=True) if value)
        parts.append(f"{mark}{name_of(candidate.worker)} score {candidate.score:.2f} {features}".rstrip())
    return "; ".join(parts).encode("ascii", "replace").decode()[:MAX_CHARS]
