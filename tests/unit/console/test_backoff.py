from services.console.backoff import Backoff


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_the_delay_doubles_up_to_its_longest() -> None:
    backoff = Backoff(Clock())
    assert [backoff.next_delay_s() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_long_life_starts_the_delay_anew() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    backoff.next_delay_s()
    backoff.next_delay_s()
    backoff.started()
    clock.now_s += 59.9
    assert backoff.next_delay_s() == 2
    backoff.started()
    clock.now_s += 60
    assert backoff.next_delay_s() == 0.5
    assert backoff.num_restarts == 1
