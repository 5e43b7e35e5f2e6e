"""Whether a request can still begin in time, by what its worker has measured."""

from __future__ import annotations

from services.router.decide import Decision, decode_s
from services.router.load import Loads
from shared.errors import Overloaded
from shared.messages.request import GenerateRequest

DOUBT = 2.0
"""A request is refused if its first token would come too late even were the worker so many times as fast as it measured."""


def too_late(request: GenerateRequest, waited_s: float, decision: Decision, loads: Loads) -> Overloaded | None:
    """Why a request is not begun: computing what nobody will wait for would only make others late. None: it may be in time.

    To be asked before the request is booked, or its tokens would count twice.
    """
    left_s, needs_s = max(request.deadline_ms / 1000 - waited_s, 0.0), first_token_s(decision, loads)
    if needs_s <= DOUBT * left_s:
        return None
    what = f"the first token would come in about {needs_s * 1e3:.0f} ms, and the deadline is in {left_s * 1e3:.0f} ms"
    return Overloaded(what, retry_after_s=max(needs_s, 1.0))


def first_token_s(decision: Decision, loads: Loads) -> float:
    """Seconds until the worker that was chosen has computed the prompt. 0 where it has measured nothing yet: a guess refuses nobody."""
    state = loads.workers.get(decision.prefill_worker or decision.decode_worker)
    if state is None or state.report is None or not state.report.prefill_tokens_per_s:
        return 0.0
    if decision.prefill_worker is None:
        return decode_s(state, decision.num_uncached_tokens)
    return (state.num_queued_tokens + decision.num_uncached_tokens) / state.prefill_tokens_per_s
