"""The NATS services protocol, as any client speaks it; over NATS nats-py's own classes read the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import nats
import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from shared.bus.base import Bus
from shared.bus.discovery import Endpoint, advertise
from shared.errors import NoResponders
from tests.support.nats import NatsServer, connect_to

ENDPOINTS = [Endpoint("generate", "ss.v1.generate", "gateways", {"door": "nats"}), Endpoint("models", "ss.v1.models")]


async def ask(bus: Bus, subject: str) -> dict[str, Any]:
    return msgspec.json.decode((await bus.request(subject, b"", timeout_s=5)).payload)  # type: ignore[no-any-return]


async def test_ping_info_stats(bus: Bus, namespace: str) -> None:
    name = f"gateway-{namespace}"
    stats = {"generate": {"num_requests": 4, "num_errors": 1, "processing_time": 4_000, "last_error": "x", "data": {"tokens": 7}}}
    advertisement = await advertise(
        bus,
        name=name,
        version="1.2.3",
        instance="0a0b0c0d",
        description="the front doors",
        metadata={"model": "m"},
        endpoints=ENDPOINTS,
        stats=lambda: stats,
    )
    for scope in (f".{name}", f".{name}.0a0b0c0d"):
        ping = await ask(bus, "$SRV.PING" + scope)
        assert ping == {
            "type": "io.nats.micro.v1.ping_response",
            "name": name,
            "id": "0a0b0c0d",
            "version": "1.2.3",
            "metadata": {"model": "m"},
        }
        info = await ask(bus, "$SRV.INFO" + scope)
        assert (info["type"], info["description"]) == ("io.nats.micro.v1.info_response", "the front doors")
        assert info["endpoints"] == [
            {"name": "generate", "subject": "ss.v1.generate", "queue_group": "gateways", "metadata": {"door": "nats"}},
            {"name": "models", "subject": "ss.v1.models", "queue_group": "", "metadata": {}},
        ]
        told = await ask(bus, "$SRV.STATS" + scope)
        assert told["type"] == "io.nats.micro.v1.stats_response"
        assert told["started"].endswith("Z")
        generate, models = told["endpoints"]
        assert (generate["num_requests"], generate["num_errors"], generate["last_error"]) == (4, 1, "x")
        assert (generate["processing_time"], generate["average_processing_time"], generate["data"]) == (4_000, 1_000, {"tokens": 7})
        assert (models["num_requests"], models["average_processing_time"]) == (0, 0)
    await advertisement.close()
    await advertisement.close()
    with pytest.raises(NoResponders):
        await ask(bus, f"$SRV.PING.{name}")


async def test_raw_nats(nats_server: NatsServer, namespace: str) -> None:
    name = f"decode-{namespace}"
    buses = [await connect_to(nats_server.url) for _ in range(2)]
    for number, bus in enumerate(buses):
        await advertise(bus, name=name, version="1.0.0", instance=f"0000000{number}", endpoints=ENDPOINTS)
    client = await nats.connect(nats_server.url)
    for verb, read in (("PING", ServicePing), ("INFO", ServiceInfo), ("STATS", ServiceStats)):
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        await client.publish(f"$SRV.{verb}", reply=inbox)  # everybody answers
        found: set[str] = set()
        while len(found) < 2:
            answer = read.from_dict(msgspec.json.decode((await replies.next_msg(timeout=5)).data))
            if answer.name == name:
                found.add(answer.id)
        assert found == {"00000000", "00000001"}
        one = await client.request(f"$SRV.{verb}.{name}.00000001", timeout=5)
        assert read.from_dict(msgspec.json.decode(one.data)).id == "00000001"
    await client.close()
    await asyncio.gather(*(bus.close() for bus in buses))
