import os

import pytest


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests has variables of their own."""
    for name in [name for name in os.environ if name.startswith(("SS_", "OTEL_"))]:
        monkeypatch.delenv(name)
