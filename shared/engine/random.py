"""Random numbers without state: keyed by (seed, position), so that a request continues the same on another worker. Torch-free."""

from __future__ import annotations

_MASK = 2**64 - 1
_STEP = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio."""


def splitmix64(value: int) -> int:
    """A bijection of 64-bit integers that scatters neighbours. Steele, Lea, Flood: Fast splittable pseudorandom number generators."""
    value = (value + _STEP) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), 52 bits: the same for the same seed and position, independent otherwise."""
    return (splitmix64(splitmix64(seed) ^ position) >> 12) * 2.0**-52
