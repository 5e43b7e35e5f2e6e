from pathlib import Path

import pytest

from services.console.options import UpOptions
from services.console.topology import Place, host_of, service_specs
from shared.config import ServiceConfig, read_config
from shared.engine.config import EngineConfig

PLACE = Place(
    folder=Path("/run"),
    nats_url="nats://127.0.0.1:1",
    nats_users={"decode": ("decode", Path("/run/nats/decode"))},
    kv_dir=Path("/dev/shm/x"),
    num_hosts=2,
    cluster_secret_file=Path("/secret"),
    http_port=8001,
)


def environ_of(options: UpOptions, name: str, environ: dict[str, str] | None = None) -> dict[str, str]:
    return next(spec.environ for spec in service_specs(options, PLACE, environ or {}, {}) if spec.name == name)


def test_every_process_of_a_stack_once() -> None:
    names = [spec.name for spec in service_specs(UpOptions(prefill=2, decode=1, hosts=2), PLACE, {}, {})]
    assert names == ["kvstore-0", "kvstore-1", "prefill-0", "prefill-1", "decode-0", "router", "planner", "gateway"]


def test_who_joins_takes_the_next_numbers() -> None:
    specs = service_specs(UpOptions(roles=("prefill", "decode"), decode=2), PLACE, {}, {"decode": 3})
    assert [spec.name for spec in specs] == ["prefill-0", "decode-3", "decode-4"]


def test_the_environment_reads_back_as_the_config() -> None:
    environ = environ_of(UpOptions(device="sim", dtype="float32", threads=3, max_model_len=99), "decode-0")
    service = read_config(ServiceConfig, environ)
    assert (service.name, service.nats_user, service.nats_password_file) == ("decode-0", "decode", Path("/run/nats/decode"))
    assert service.trace_dir == Path("/run/traces")
    engine = read_config(EngineConfig, environ)
    assert (engine.device, engine.dtype, engine.threads, engine.max_model_len) == ("sim", "float32", 3, 99)


def test_a_setting_of_the_user_reaches_the_service_unless_a_flag_says_otherwise() -> None:
    given = {"SS_MAX_NUM_SEQS": "5", "SS_LOG_LEVEL": "debug", "SS_NATS_URL": "nats://elsewhere:1"}
    environ = environ_of(UpOptions(), "decode-0", given)
    assert (environ["SS_MAX_NUM_SEQS"], environ["SS_LOG_LEVEL"], environ["SS_NATS_URL"]) == ("5", "debug", "nats://127.0.0.1:1")


@pytest.mark.parametrize(("num_workers", "num_hosts"), [(1, 2), (2, 2), (3, 2), (4, 3)])
def test_with_two_hosts_prefill_and_decode_sit_apart(num_workers: int, num_hosts: int) -> None:
    prefill = [host_of("prefill", index, num_hosts) for index in range(num_workers)]
    decode = [host_of("decode", index, num_hosts) for index in range(num_workers)]
    assert prefill[0] != decode[0]
    assert max(prefill + decode) < num_hosts


def test_only_who_uses_an_arena_is_told_of_one() -> None:
    specs = {spec.name: spec.environ for spec in service_specs(UpOptions(hosts=2), PLACE, {}, {})}
    assert specs["prefill-0"]["SS_KV_DIR"].endswith("host-0")
    assert specs["decode-0"]["SS_KV_DIR"].endswith("host-1")
    assert "SS_KV_DIR" not in specs["gateway"]
    assert specs["gateway"]["SS_HTTP_PORT"] == "8001"
