import pytest

from services.console.model_phase import check_context
from services.console.options import UpOptions
from shared.errors import ConfigError


def test_more_context_than_the_model_has_is_refused_before_a_worker_starts() -> None:
    with pytest.raises(ConfigError, match="8192 tokens") as caught:
        check_context(UpOptions(max_model_len=8193), 8192)
    assert caught.value.variable == "--max-model-len" and "at most 8192" in caught.value.remedy


@pytest.mark.parametrize("options", [UpOptions(), UpOptions(max_model_len=8192), UpOptions(max_model_len=9000, device="sim")])
def test_what_fits_passes(options: UpOptions) -> None:
    check_context(options, 8192)
