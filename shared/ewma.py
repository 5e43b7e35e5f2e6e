"""A running mean of what is measured again and again."""

from __future__ import annotations


class Ewma:
    """An exponentially weighted mean; 0 until the first value."""

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value = 0.0

    def add(self, value: float) -> None:
        self.value = value if self.value == 0.0 else self.value + self._weight * (value - self.value)
