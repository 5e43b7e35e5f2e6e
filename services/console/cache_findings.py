"""Why prompts were computed instead of found: the routers' miss counters, summed up with advice. Pure: pages in, findings out."""

from __future__ import annotations

from collections.abc import Iterator

from services.console.findings import Finding
from services.console.pages import Pages
from services.console.terminal import share_text
from shared.telemetry.scrape import Page

NOTABLE = 0.1
"""Of all prompt tokens: a share worth advice."""
OFTEN_SIMILAR = 0.2
"""Of the requests: so many resemble an earlier one that the difference is worth looking for."""

_REASONS = {
    "cold": (
        "no earlier prompt began like them, not even in the first block",
        "Put what all prompts share first; compute common beginnings ahead:\nslipstream up --warm FILE",
    ),
    "diverged": (
        "they are like an earlier prompt up to some place, and then differ",
        "Put what changes (a date, an id, a name, tools in another order) behind what stays, spelled the same to the blank",
    ),
    "evicted": ("they had been there and had to make room", "Give the tiers more: --kv-dram, --kv-ssd"),
    "elsewhere": ("another worker or host has them, and loading was not worth it, or that one was busy", ""),
    "stale_index": ("the router's index was behind just then", "slipstream doctor stack"),
    "shorter_than_block": ("prompts shorter than a block are not cached", ""),
}
_FIRST_BLOCK = (
    "{:.0%} of the requests resemble an earlier one more than their beginnings show",
    "Something that changes (a date, an id, a greeting with a name) stands in the first tokens: move it behind what stays",
)


KINDS = {
    "whitespace": "a blank or a line break that the earlier ones have not, or have more of",
    "order": "JSON with its keys, or its tools, in another order",
    "time": "a date or a time",
    "id": "an id",
    "tools": "a tool's description",
    "number": "a number",
}
"""What stands where a prompt leaves the earlier ones, if it is worth moving. Text that differs is what prompts are for."""
_REMEDIES = {
    "whitespace": "Spell what stays the same to the blank: what follows can then be reused",
    "order": "Write keys and tools always in the same order (sort them): what follows can then be reused",
}
"""Of what need not move."""
_PLACES = {
    "beginning": "{:.0%} of the prompt tokens stand behind {} among the first words of prompts that begin like no other",
    "later": "{:.0%} of the prompt tokens stand behind {}, which is where prompts that began alike come to differ",
}


def cache_findings(pages: Pages) -> list[Finding]:
    """The hit rate, what was missed by reason (most first), then what was lost on the way between processes."""
    router = pages.of("router")
    asked = router.total("slipstream_router_prompt_tokens_total")
    if not asked:
        return [Finding("done", "no request was routed yet")]
    had = router.total("slipstream_router_overlap_tokens_total")
    found = [Finding("done", f"{share_text(had / asked)} of {asked:,.0f} prompt tokens were there already")]
    return [*found, *_missed(router, asked, had), *_forks(pages.of("gateway")), *_lost(pages.of("prefill", "decode"))]


def _missed(router: Page, asked: float, had: float) -> Iterator[Finding]:
    missed = {reason: tokens for reason, tokens in router.by("slipstream_router_miss_tokens_total", "reason").items() if tokens}
    for reason, tokens in sorted(missed.items(), key=lambda one: -one[1]):
        means, remedy = _REASONS.get(reason, (reason, ""))
        is_notable = bool(remedy) and tokens / asked >= NOTABLE
        yield Finding(
            "warning" if is_notable else "done", f"{share_text(tokens / asked)} were computed: {means}", remedy if is_notable else ""
        )
    # A whole prompt that is there is computed for its last tokens all the same: logits come from somewhere.
    rest = asked - had - sum(missed.values())
    if rest > 0:
        yield Finding("done", f"{share_text(rest / asked)} were computed: the ends of prompts that were there, which fill no whole block")
    outcomes = router.by("slipstream_router_similar_total", "outcome")
    similar = outcomes.get("found", 0.0) / (sum(outcomes.values()) or 1.0)
    if similar >= OFTEN_SIMILAR and missed.get("cold", 0.0) / asked >= NOTABLE:
        text, remedy = _FIRST_BLOCK
        yield Finding("warning", text.format(similar), remedy)


def _forks(gateway: Page) -> Iterator[Finding]:
    """What would have to move for more to be reused: as far as the gateways can tell, these tokens would be found without it."""
    asked = gateway.total("vllm:prompt_tokens_total")
    for place, text in _PLACES.items():
        tokens = gateway.by("slipstream_prompt_fork_tokens_total", "kind", place=place)
        for kind, number in sorted(tokens.items(), key=lambda one: -one[1]):
            if kind in KINDS and number >= NOTABLE * asked:
                move = f"Move {KINDS[kind]} behind what stays the same, or leave it out: what follows can then be reused"
                yield Finding("warning", text.format(number / asked, KINDS[kind]), _REMEDIES.get(kind, move))


def _lost(workers: Page) -> Iterator[Finding]:
    for reason, number in sorted(workers.by("slipstream_kvclient_faults_total", "reason").items()):
        if number:
            yield Finding("warning", f"{number:,.0f} store operations ended as misses: {reason}", "slipstream logs kvstore")
    for reason, number in sorted(workers.by("slipstream_decode_handoff_misses_total", "reason").items()):
        if number:
            text = f"{number:,.0f} blocks that prefill had computed did not reach decode: {reason}"
            yield Finding("warning", text, "slipstream trace --list")
