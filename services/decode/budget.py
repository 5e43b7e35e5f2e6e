"""How many prompt tokens a decode step may compute beside the decoding sequences."""

from __future__ import annotations

from shared.ewma import Ewma

SMALLEST = 16
LARGEST = 2048
IDLE_MS = 200.0
"""What a step in which nothing decodes may take: there is no inter-token latency to protect, but a cancel waits for its end."""
FIRST_IDLE_TOKENS = 256
"""Prompt tokens of such a step, until what a token costs is known."""
LEAST_IDLE_TOKENS = 128
"""A step costs something whatever it computes: the fewer its tokens, the dearer each seems, and the fewer the next step would have."""


class PrefillBudget:
    """What the inter-token target leaves, by the measured cost of a decode step and of a prompt token."""

    def __init__(self, num_tokens: int, target_itl_ms: float) -> None:
        self.num_tokens = num_tokens
        self._target_itl_ms = target_itl_ms
        self.decode_ms = Ewma()
        """A step without prompt tokens."""
        self.ms_per_token = Ewma()

    @property
    def num_idle_tokens(self) -> int:
        """Prompt tokens of a step in which nothing decodes."""
        idle = IDLE_MS / self.ms_per_token.value if self.ms_per_token.value else FIRST_IDLE_TOKENS
        return max(int(min(idle, LARGEST)), LEAST_IDLE_TOKENS, self.num_tokens)

    def observe(self, step_ms: float, num_prompt_tokens: int, num_decoding: int) -> None:
        """One step was measured."""
        if num_prompt_tokens == 0:
            self.decode_ms.add(step_ms)
        elif num_prompt_tokens >= SMALLEST:
            rest_ms = step_ms - (self.decode_ms.value if num_decoding else 0.0)
            self.ms_per_token.add(max(rest_ms, 0.0) / num_prompt_tokens)
        if self.decode_ms.value and self.ms_per_token.value:
            room = (self._target_itl_ms - self.decode_ms.value) / self.ms_per_token.value
            self.num_tokens = int(min(max(room, SMALLEST), LARGEST))
