"""Keys at both doors, tenants that share nothing, and the NATS door over either bus."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.auth import read_keys
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from shared.bus.base import Bus, Message
from shared.config import ServiceConfig
from shared.errors import BusTimeout, ConfigError
from shared.service import mint_instance, run_service
from shared.telemetry import NullTelemetry
from tests.conftest import Buses
from tests.support.cluster import Cluster
from tests.support.http import Web
from tests.support.model_fixture import MODEL
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# tenants\nred:{hashed('red-key')}\n\nblue:{hashed('blue-key')}\n")
    return path


@pytest.fixture
async def cluster(make_bus: Buses, namespace: str, tmp_path: Path, keys_file: Path) -> AsyncIterator[Cluster]:
    async with Cluster(make_bus, namespace, tmp_path, keys_file=keys_file) as cluster:
        await cluster.decode()
        await cluster.router()
        await cluster.served()
        yield cluster


def body(**fields: Any) -> bytes:
    return msgspec.json.encode(
        {"model": MODEL, "prompt": [1000 + index for index in range(40)], "max_tokens": 4, "temperature": 0, **fields}
    )


async def replies(bus: Bus, cluster: Cluster, payload: bytes, **headers: str) -> list[Message]:
    subject = cluster.gateway.subjects.front_door("generate")
    return [message async for message in bus.request_many(subject, payload, stall_s=10.0, headers=headers)]


async def test_without_a_key_nothing_but_health_is_answered(cluster: Cluster) -> None:
    web = Web(cluster.gateway.describe().http_address)
    for method, path in (
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/openapi.json"),
        ("POST", "/tokenize"), ("GET", "/nowhere"), ("GET", "//v1/models"), ("HEAD", "/v1/models"),
    ):  # fmt: skip
        for key in ("", "Bearer wrong", "red-key", "Basic red-key", "Bearer "):
            reply = await web.send(method, path, b"", authorization=key)
            assert reply.status == 401, (method, path, key)
            assert reply.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/live"):
        assert (await web.get(path)).status == 200
    assert (await web.get("/v1/models", authorization="Bearer red-key")).status == 200


async def test_tenants_reuse_their_own_blocks_only(cluster: Cluster) -> None:
    """T34, and T35: another's cache_salt opens nothing."""
    web = Web(cluster.gateway.describe().http_address)

    async def cached(key: str, **fields: Any) -> int:
        reply = await web.post("/v1/completions", body(**fields), authorization=f"Bearer {key}")
        assert reply.status == 200, reply.body
        tokens: int = reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        return tokens

    assert [await cached("red-key"), await cached("red-key")] == [0, 32]
    assert [await cached("blue-key"), await cached("blue-key")] == [0, 32]
    assert [await cached("red-key", cache_salt="mine"), await cached("red-key", cache_salt="mine")] == [0, 32]
    assert await cached("blue-key", cache_salt="mine") == 0


async def test_a_call_over_nats_is_answered_whole_or_streamed(cluster: Cluster, make_bus: Buses) -> None:
    bus = await make_bus()
    key = {"Authorization": "Bearer red-key"}
    whole = await bus.request(cluster.gateway.subjects.front_door("generate"), body(), timeout_s=10.0, headers=key)
    expected = msgspec.json.decode(whole.payload)
    packed = msgspec.msgpack.encode(msgspec.json.decode(body()))
    again = await bus.request(cluster.gateway.subjects.front_door("generate"), packed, timeout_s=10.0, headers=key)
    assert msgspec.json.decode(again.payload)["choices"] == expected["choices"]
    messages = await replies(bus, cluster, body(stream=True, user="me", frobnicate=1), **key)
    assert messages[-1].payload == b"" and "x-slipstream-ignored" not in whole.headers
    assert messages[-1].headers["x-slipstream-ignored"] == "user, frobnicate"
    chunks = [msgspec.json.decode(message.payload) for message in messages[:-1]]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == expected["choices"][0]["text"]
    models = await bus.request(cluster.gateway.subjects.front_door("models"), b"", timeout_s=5.0, headers=key)
    assert msgspec.json.decode(models.payload)["data"][0]["id"] == MODEL


async def test_both_endpoints_are_counted_and_timed(cluster: Cluster, make_bus: Buses) -> None:
    bus, front_door = await make_bus(), cluster.gateway.subjects.front_door
    await bus.request(front_door("generate"), body(), timeout_s=10.0, headers={"Authorization": "Bearer red-key"})
    await bus.request(front_door("generate"), body(), timeout_s=10.0)  # no key
    await bus.request(front_door("models"), b"", timeout_s=10.0, headers={"Authorization": "Bearer red-key"})
    refused = await bus.request(front_door("models"), b"", timeout_s=10.0)
    assert (refused.payload, refused.headers["nats-service-error-code"]) == (b"", "401")
    await until(lambda: cluster.gateway.endpoint_stats()["generate"]["processing_time"])
    generate, models = (cluster.gateway.endpoint_stats()[name] for name in ("generate", "models"))
    assert (generate["num_requests"], generate["num_errors"], generate["last_error"]) == (2, 1, "401:invalid_api_key")
    assert (models["num_requests"], models["num_errors"], models["last_error"]) == (2, 1, "401:invalid_api_key")
    assert models["processing_time"]


async def test_without_any_model_a_call_is_told_to_come_back(make_bus: Buses, namespace: str, tmp_path: Path) -> None:
    async with Cluster(make_bus, namespace, tmp_path) as alone:
        reply = await Web(alone.gateway.describe().http_address).post("/v1/completions", body())
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "no_workers", "1")
        over_nats = await (await make_bus()).request(alone.gateway.subjects.front_door("generate"), body(), timeout_s=10.0)
        assert over_nats.headers["nats-service-error-code"] == "503"


@pytest.mark.parametrize(
    ("payload", "key", "status"),
    [
        (body(), "", 401),
        (body(), "Bearer wrong", 401),
        (b"{", "Bearer red-key", 400),
        (b"\xc1", "Bearer red-key", 400),
        (b"", "Bearer red-key", 400),
        (body(model="other"), "Bearer red-key", 404),
        (body(max_tokens=0), "Bearer red-key", 400),
    ],
)
async def test_errors_over_nats_stand_in_headers(cluster: Cluster, make_bus: Buses, payload: bytes, key: str, status: int) -> None:
    bus, subject = await make_bus(), cluster.gateway.subjects.front_door("generate")
    asked = bus.request_many(subject, payload, stall_s=10.0, headers={"Authorization": key} if key else {})
    message = await anext(asked)
    await asked.aclose()  # type: ignore[attr-defined]
    headers = {name.lower(): value for name, value in message.headers.items()}
    assert headers["nats-service-error-code"] == str(status)
    assert headers["nats-service-error"]
    assert set(msgspec.json.decode(message.payload)["error"]) == {"message", "type", "param", "code"}


async def test_an_error_is_one_message_and_ends_a_stream(cluster: Cluster, make_bus: Buses) -> None:
    bus, subject = await make_bus(), cluster.gateway.subjects.front_door("generate")
    headers = {"Authorization": "Bearer red-key"}
    for stream in (False, True):
        asked = bus.request_many(subject, body(max_tokens=10**9, stream=stream), stall_s=0.3, headers=headers)
        messages = []
        with contextlib.suppress(BusTimeout):
            async for message in asked:
                messages.append(message)
        assert [bool(message.payload) for message in messages] == ([True, False] if stream else [True])


@pytest.mark.parametrize("text", ["", "red", "red:xyz", "re d:" + "0" * 64, "red:" + "0" * 63])
def test_a_bad_key_file_names_its_line_and_no_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match="SS_KEYS_FILE"):
        read_keys(path)


async def test_an_open_door_to_the_world_needs_to_be_asked_for(make_bus: Buses, namespace: str, tmp_path: Path) -> None:
    config = GatewayConfig(service=ServiceConfig(namespace=namespace), http_host="0.0.0.0", http_port=0, cluster_secret_file=tmp_path / "s")
    service = GatewayService(config, await make_bus(), NullTelemetry(), mint_instance())
    with pytest.raises(ConfigError, match="SS_HTTP_HOST"):
        async with run_service(service):
            pass
