import pytest

from services.console.options import parse_options
from services.console.settings_check import check_settings
from shared.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_settings")


@pytest.mark.parametrize("flags", [[], ["--device", "sim", "--prefill", "4", "--decode", "4"], ["--hosts", "2"], ["--only", "decode"]])
def test_what_is_usual_passes(flags: list[str]) -> None:
    check_settings(parse_options(flags), {})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SS_KV_POLICY", "newest"),
        ("SS_KV_SSD_POLICY", "newest"),
        ("SS_LOG_LEVEL", "loud"),
    ],
)
def test_a_variable_that_a_service_would_refuse_is_refused_by_its_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_settings(parse_options([]), {variable: value})
    assert variable in str(caught.value)
    assert value in str(caught.value)


def test_a_service_that_is_not_started_is_not_asked() -> None:
    check_settings(parse_options(["--only", "decode"]), {"SS_KV_POLICY": "newest"})
