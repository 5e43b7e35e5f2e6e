"""What a supervisor hands to a child arrives as it was."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shared.config import ServiceConfig, parse_size, read_config, to_environ
from shared.engine.config import EngineConfig

# What an environment can hold: no NUL, no lone surrogates.
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)
folders = texts.filter(lambda text: text not in ("", ".") and not text.startswith("~")).map(Path)
paths = st.none() | folders
ports = st.integers(0, 65535)

service_configs = st.builds(
    ServiceConfig,
    name=texts,
    namespace=texts,
    nats_url=texts,
    nats_user=texts,
    nats_password_file=paths,
    nats_creds=paths,
    metrics_host=texts,
    metrics_port=ports,
    trace_dir=paths,
    log_level=texts,
    status_fd=st.none() | st.integers(0, 1000),
    drain_s=st.floats(0, 3600),
    parent_death=st.booleans(),
)


@given(service_configs)
def test_a_service_config_survives_the_environment(config: ServiceConfig) -> None:
    assert read_config(ServiceConfig, to_environ(config)) == config


engine_configs = st.builds(
    EngineConfig,
    model=texts,
    device=st.sampled_from(["cpu", "cuda", "sim"]),
    numerics=st.sampled_from(["default", "exact"]),
    block_size=st.integers(1, 256),
    kv_device=st.integers(0, 2**50),
    cache_dir=folders,
)


@given(engine_configs)
def test_an_engine_config_survives_the_environment(config: EngineConfig) -> None:
    assert read_config(EngineConfig, to_environ(config)) == config


@given(st.integers(0, 2**50))
def test_a_number_of_bytes_is_a_size(num_bytes: int) -> None:
    assert parse_size(str(num_bytes)) == num_bytes
    assert parse_size(f"{num_bytes}B") == num_bytes


@given(st.integers(0, 1000), st.sampled_from(["", "K", "M", "G", "T"]), st.sampled_from(["", "B", "iB"]))
def test_units_are_powers_of_1024(number: int, unit: str, ending: str) -> None:
    assert parse_size(f"{number}{unit}{ending}") == number * 1024 ** " KMGT".index(unit or " ")
