"""What `bench telemetry` stands on: its interval, and a collector that is as it is told to be."""

from __future__ import annotations

import random
import socket
import statistics
import urllib.request

import pytest

from loadtest.bench.telemetry import Block, _collector, compared, median_with_interval


@pytest.mark.parametrize(("num", "rank"), [(6, 0), (9, 1), (20, 5), (25, 7), (60, 21)])
def test_the_interval_is_the_one_of_the_tables(num: int, rank: int) -> None:
    """The sign test's: of 20 values the 6th and the 15th."""
    values = [float(value) for value in range(num)]
    random.Random(0).shuffle(values)
    assert median_with_interval(values) == (statistics.median(values), rank, num - 1 - rank)


def test_of_few_values_it_is_all_of_them() -> None:
    assert median_with_interval([2.0]) == (2.0, 2.0, 2.0)
    assert median_with_interval([1.0, 3.0, 2.0]) == (2.0, 1.0, 3.0)


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    held = 0
    for _ in range(400):
        _, low, high = median_with_interval([rng.gauss(0.0, 1.0) for _ in range(15)])
        held += low <= 0.0 <= high
    assert held / 400 >= 0.93


def test_the_collector_takes_hangs_and_is_dead_as_it_is_told() -> None:
    def send() -> int:
        with urllib.request.urlopen(f"{collector.url}/v1/traces", b"spans", timeout=0.5) as answer:
            return int(answer.status)

    with _collector() as collector:
        assert send() == 200
        assert collector.be("hangs") == 1
        with pytest.raises(TimeoutError):
            send()
        assert collector.be("dead") == 2, "it read what it does not answer"
        with pytest.raises(OSError, match="refused"):
            send()
        collector.be("takes")
        assert send() == 200
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(collector.url.rpartition(":")[2]))) != 0, "nothing is left behind"


def test_a_round_compares_only_its_own_blocks() -> None:
    """The second round ran on a machine that was twice as slow: no ratio shows it."""
    rounds = [
        {
            "control": Block([10.0 * slow] * 3, [10.0 * slow] * 3, 4.0 * slow),
            "takes": Block([10.2 * slow] * 3, [10.0 * slow] * 3, 4.2 * slow),
            "dead": Block([10.1 * slow] * 3, [10.0 * slow] * 3, 4.2 * slow),
            "hangs": Block([10.1 * slow] * 3, [10.0 * slow] * 3, 4.41 * slow),
        }
        for slow in (1.0, 2.0)
    ]
    rows = {row.name: row.value for row in compared(rounds)}
    assert rows["traced_by_untraced_control"] == 1.0
    assert rows["traced_by_untraced_takes"] == pytest.approx(1.02)
    assert rows["cpu_traced_by_untraced"] == pytest.approx(1.1), "half of a block is traced"
    assert (rows["cpu_dead_by_takes"], rows["cpu_hangs_by_takes_high"]) == (pytest.approx(1.0), pytest.approx(1.05))
    assert rows["p50_dead_by_takes"] == pytest.approx(10.1 / 10.2)
