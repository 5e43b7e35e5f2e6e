"""Settings from the environment: what is read, and what stops the process."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from shared.config import Bytes, ServiceConfig, parse_size, read_config, to_environ
from shared.errors import ConfigError


class Nested(msgspec.Struct, frozen=True, kw_only=True):
    service: ServiceConfig
    kv_dram: Bytes = 2**30
    http_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    numerics: Literal["default", "exact"] = "default"
    kv_dir: Path | None = None
    model: str
    ratio: float = 0.5
    open: bool = False


def test_a_field_is_its_variable_and_structs_are_flat() -> None:
    config = read_config(
        Nested,
        {
            "SS_MODEL": "m",
            "SS_KV_DRAM": "1.5G",
            "SS_NAME": "decode-0",
            "SS_OPEN": "yes",
            "SS_KV_DIR": "/x",
            "SS_RATIO": "0.25",
            "HOME": "/root",
        },
    )
    assert config == Nested(service=ServiceConfig(name="decode-0"), kv_dram=3 * 2**29, kv_dir=Path("/x"), model="m", ratio=0.25, open=True)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SS_HTTP_PORT", "70000"),
        ("SS_HTTP_PORT", "-1"),
        ("SS_HTTP_PORT", "http"),
        ("SS_HTTP_PORT", ""),
        ("SS_KV_DRAM", "plenty"),
        ("SS_NUMERICS", "Exact"),
        ("SS_OPEN", "perhaps"),
        ("SS_RATIO", "half"),
        ("SS_DRAIN_S", "-1"),
    ],
)
def test_a_bad_value_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(Nested, {"SS_MODEL": "m", variable: value})
    assert caught.value.variable == variable
    assert repr(value) in caught.value.message


def test_what_is_required_must_be_set() -> None:
    with pytest.raises(ConfigError, match="SS_MODEL"):
        read_config(Nested, {})


def test_an_empty_optional_is_none() -> None:
    assert read_config(Nested, {"SS_MODEL": "m", "SS_KV_DIR": ""}).kv_dir is None


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("4096", 4096), ("512M", 512 * 2**20), ("1g", 2**30), ("1.5GiB", 3 * 2**29), (" 2 TB ", 2**41), ("10B", 10)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "1P", "-1G", "1e3", "1 2", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_to_environ_leaves_out_what_is_not_set() -> None:
    environ = to_environ(ServiceConfig())
    assert "SS_TRACE_DIR" not in environ
    assert environ["SS_PARENT_DEATH"] == "0"
