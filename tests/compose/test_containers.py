"""What the containers may do, what the images hold, and whether the file is well formed in every profile."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.compose import ROOT, Compose

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


def test_containers_have_no_more_rights_than_they_need(compose: Compose) -> None:
    for service in ("nats", "gateway", "router", "planner", "kvstore", "prefill", "decode"):
        [container, *_] = compose.containers(service)
        assert compose.inspect(container, "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}}") == "10001:10001 true"
        assert compose.inspect(container, "{{.HostConfig.CapDrop}} {{.HostConfig.SecurityOpt}}") == "[ALL] [no-new-privileges:true]"
        assert int(compose.inspect(container, "{{.HostConfig.Memory}}")) > 0
        ports = json.loads(compose.inspect(container, "{{json .HostConfig.PortBindings}}")) or {}
        assert all(binding["HostIp"] == "127.0.0.1" for bindings in ports.values() for binding in bindings), service


def test_no_compiler_ships_and_every_kernel_does(compose: Compose) -> None:
    sources = {source.stem for package in ("services", "shared") for source in (ROOT / package).rglob("*.c")}
    for image in ("slipstream-core", "slipstream-worker"):
        command = ["docker", "run", "--rm", "--network", "none", image, "sh", "-c", "command -v cc gcc clang; ls /cache/kernels"]
        files = subprocess.run(command, env=compose.environ, capture_output=True, text=True, check=True).stdout.split()
        assert {name.rsplit("-", 1)[0] for name in files} == sources, image


def test_images_are_small(compose: Compose) -> None:
    """Beside the base image and the model: the base of the day is not ours to bound."""
    sizes = subprocess.run([ROOT / "infra/docker/sizes.sh"], env=compose.environ, capture_output=True, text=True, check=True).stdout
    rest = {line.split()[0]: float(line.split()[-1]) for line in sizes.splitlines()[1:]}
    assert 50 < rest["slipstream-core"] < 270, sizes
    assert 300 < rest["slipstream-worker"] < 1370, sizes


@pytest.mark.parametrize("profiles", ["cpu", "gpu", "cpu,obs"])
def test_every_profile_is_well_formed_and_what_it_mounts_is_there(compose: Compose, profiles: str) -> None:
    config = json.loads(compose.run("config", "--format", "json", COMPOSE_PROFILES=profiles).stdout)
    mounts = [mount for service in config["services"].values() for mount in service.get("volumes", [])]
    assert [mount["source"] for mount in mounts if mount["type"] == "bind" and not Path(mount["source"]).exists()] == []
    published = [port for service in config["services"].values() for port in service.get("ports", [])]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    for name, service in config["services"].items():
        assert service.get("image", "").rpartition(":")[2] != "latest" and service["mem_limit"] and service["cpus"], name


def test_what_watches_is_pointed_at_services_that_there_are(compose: Compose) -> None:
    """Prometheus at all that have metrics, services at the Collector, the Collector at Tempo, Grafana at Prometheus and Tempo."""
    files = ("--env-file", ".env", "--env-file", "infra/otel/obs.env")
    services = json.loads(compose.run(*files, "config", "--format", "json", COMPOSE_PROFILES="cpu,gpu,obs").stdout)["services"]
    infra = ROOT / "infra"
    [names] = re.findall(r"names: \[(.*)\]", (infra / "prometheus/prometheus.yml").read_text())
    with_metrics = {name for name, service in services.items() if "SS_METRICS_PORT" in (service.get("environment") or {})}
    assert set(names.split(", ")) == with_metrics
    endpoints = {(service.get("environment") or {}).get("OTEL_EXPORTER_OTLP_ENDPOINT") for service in services.values()} - {None}
    assert endpoints == {"http://collector:4318"}
    collector, tempo = ((infra / "otel" / name).read_text() for name in ("collector.yaml", "tempo.yaml"))
    assert "endpoint: 0.0.0.0:4318" in collector and "endpoint: tempo:4317" in collector
    assert "endpoint: 0.0.0.0:4317" in tempo and "http_listen_port: 3200" in tempo
    sources = (infra / "grafana/provisioning/datasources/slipstream.yaml").read_text()
    assert set(re.findall(r"http://([a-z]+:\d+)", sources)) == {"prometheus:9090", "tempo:3200"}
    assert all("bus" in services[name]["networks"] for name in ("collector", "tempo", "prometheus", "grafana"))
