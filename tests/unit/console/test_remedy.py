import pytest

from services.console.remedy import LOGS_VARIABLE, as_typed_here

COMPOSE = {LOGS_VARIABLE: "docker compose logs"}


@pytest.mark.parametrize(
    ("remedy", "in_containers"),
    [
        ("slipstream logs router --level warning", "docker compose logs router"),
        ("slipstream logs decode-3fa2b1", "docker compose logs decode"),
        ("slipstream logs --level error", "docker compose logs"),
        ("later: slipstream logs nats    and, if it hangs: kill 7", "later: docker compose logs nats    and, if it hangs: kill 7"),
        ("More CPU, or fewer workers", "More CPU, or fewer workers"),
    ],
)
def test_logs_are_read_where_they_are(remedy: str, in_containers: str) -> None:
    assert as_typed_here(remedy, {}) == remedy
    assert as_typed_here(remedy, COMPOSE) == in_containers
