"""Numbers keyed by (seed, position)."""

import numpy as np

from shared.engine.random import splitmix64, uniform


def test_the_published_sequence() -> None:
    """splitmix64 from state 0: the first outputs of the reference implementation."""
    step = 0x9E3779B97F4A7C15
    assert [splitmix64(step * n % 2**64) for n in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_the_same_key_gives_the_same_number_for_ever() -> None:
    """Golden: a request that migrates to another version of the code must go on as it began."""
    assert [uniform(0, 0), uniform(7, 1), uniform(2**63 - 1, 2**20)] == GOLDEN


def test_uniform_over_positions_and_over_seeds() -> None:
    for numbers in ([uniform(3, position) for position in range(20_000)], [uniform(seed, 3) for seed in range(20_000)]):
        values = np.array(numbers)
        assert values.min() >= 0.0
        assert values.max() < 1.0
        counts, _ = np.histogram(values, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


GOLDEN = [0.6524484863740321, 0.23928447285727472, 0.4577439942992072]
