"""The NATS services protocol: any service answers `$SRV.PING`, `$SRV.INFO` and `$SRV.STATS`, so that `nats micro ls` finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from shared.bus.base import Bus, Handler, Message, Subscription

TYPE = "io.nats.micro.v1"

Stats = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Endpoint name → its numbers; any of num_requests, num_errors, processing_time (ns), last_error, data."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One subject that a service answers."""

    name: str
    subject: str
    queue_group: str = ""
    metadata: Mapping[str, str] | None = None


class Advertisement:
    """The answers of one service instance, until `close`."""

    def __init__(self, subscriptions: list[Subscription]) -> None:
        self._subscriptions = subscriptions

    async def close(self) -> None:
        """Withdraw. Idempotent."""
        for subscription in self._subscriptions:
            await subscription.close()


async def advertise(
    bus: Bus,
    *,
    name: str,
    version: str,
    instance: str,
    description: str = "",
    metadata: Mapping[str, str] | None = None,
    endpoints: Sequence[Endpoint] = (),
    stats: Stats | None = None,
) -> Advertisement:
    """Answer discovery for one service instance. `name`: letters, digits, - and _; `version`: like 1.2.3."""
    identity = {"name": name, "id": instance, "version": version, "metadata": dict(metadata or {})}
    started = datetime.now(UTC).isoformat().replace("+00:00", "Z")

    def ping() -> dict[str, Any]:
        return {"type": f"{TYPE}.ping_response", **identity}

    def info() -> dict[str, Any]:
        listed = [_shown(endpoint) | {"metadata": dict(endpoint.metadata or {})} for endpoint in endpoints]
        return {"type": f"{TYPE}.info_response", **identity, "description": description, "endpoints": listed}

    def statistics() -> dict[str, Any]:
        numbers = stats() if stats else {}
        listed = [_shown(endpoint) | _counted(numbers.get(endpoint.name, {})) for endpoint in endpoints]
        return {"type": f"{TYPE}.stats_response", **identity, "started": started, "endpoints": listed}

    answers = {"PING": ping, "INFO": info, "STATS": statistics}
    subscriptions = []
    for verb, answer in answers.items():
        for scope in ("", f".{name}", f".{name}.{instance}"):
            subscriptions.append(await bus.serve(f"$SRV.{verb}{scope}", _handler(answer)))
    return Advertisement(subscriptions)


def _handler(answer: Callable[[], dict[str, Any]]) -> Handler:
    async def handle(message: Message) -> bytes:
        return msgspec.json.encode(answer())

    return handle


def _shown(endpoint: Endpoint) -> dict[str, Any]:
    return {"name": endpoint.name, "subject": endpoint.subject, "queue_group": endpoint.queue_group}


def _counted(numbers: Mapping[str, Any]) -> dict[str, Any]:
    num_requests = int(numbers.get("num_requests", 0))
    processing_ns = int(numbers.get("processing_time", 0))
    return {
        "num_requests": num_requests,
        "num_errors": int(numbers.get("num_errors", 0)),
        "last_error": str(numbers.get("last_error", "")),
        "processing_time": processing_ns,
        "average_processing_time": processing_ns // num_requests if num_requests else 0,
        "data": numbers.get("data", {}),  # nats-py wants the key
    }
