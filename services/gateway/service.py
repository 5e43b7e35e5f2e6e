"""A gateway's process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn

from services.gateway.admission import Admission
from services.gateway.auth import check_exposure, read_keys
from services.gateway.config import GatewayConfig
from services.gateway.desk import Desk
from services.gateway.http import HttpDoor
from services.gateway.models import Models
from services.gateway.natsdoor import NatsDoor, endpoints
from services.gateway.protocol import WireLimits, bounded_protocol
from services.gateway.secret import cluster_secret
from services.gateway.sessions import Sessions
from services.gateway.worker_loads import WorkerLoads
from shared.bus.base import Bus
from shared.bus.discovery import Endpoint
from shared.errors import EnvironmentFault
from shared.messages.fleet import WorkerLease
from shared.service import Service
from shared.telemetry import Telemetry
from shared.types import InstanceId

STOP_S = 2.0
HEAD_BYTES = 32_768

log = logging.getLogger(__name__)


class GatewayService(Service):
    """Ready when it can let requests in; whether a worker serves them, /health says."""

    role = "gateway"

    def __init__(self, config: GatewayConfig, bus: Bus, telemetry: Telemetry, instance: InstanceId) -> None:
        super().__init__(config.service, bus, telemetry, instance)
        self.config = config
        self.models = Models(bus, self.subjects, self.fleet, config.tokenizer_path)
        self.sessions = Sessions(bus, self.subjects, self.fleet, telemetry, instance, self.spawn)
        self._http_address = ""
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._desk: Desk | None = None
        self._nats_door: NatsDoor | None = None

    async def start(self) -> None:
        config = self.config
        check_exposure(config.http_host, config.keys_file, config.open)
        keys = read_keys(config.keys_file)
        secret = await asyncio.to_thread(cluster_secret, config.cluster_secret_file)
        listener = _listen(config.http_host, config.http_port)
        self.spawn(self.models.follow(), "models")
        self.spawn(WorkerLoads(self.bus, self.subjects, self.fleet, self.telemetry, self.models.name_of).follow(), "worker-loads")
        await self.sessions.start()
        admission = Admission(self.models, self.instance, secret, config.deadline_s)
        self._desk = Desk(self.bus, self.subjects, self.telemetry, self.instance, admission, self.sessions, config.max_requests)
        http = HttpDoor(
            self._desk,
            self.models,
            keys,
            self.telemetry,
            max_body=config.max_body,
            read_s=config.read_s,
            strict_params=config.strict_params,
        )
        self._nats_door = NatsDoor(self.bus, self.subjects, self._desk, http, keys, self.telemetry, self.spawn)
        await self._nats_door.start()
        await self._serve_http(http, listener)

    async def _serve_http(self, http: HttpDoor, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self._http_address = f"{host}:{port}"
        config = self.config
        limits = WireLimits(
            read_s=config.read_s,
            write_s=config.write_s,
            head_bytes=HEAD_BYTES,
            max_connections=config.max_connections,
            refused=lambda code: self.telemetry.count("http_errors", code=code),
        )
        settings = uvicorn.Config(
            http.app(),
            http=bounded_protocol(limits),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            log_level="error",  # what is no HTTP is counted; it must not fill the log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=60,
            backlog=2048,
        )
        self._server = _Server(settings)
        listener.listen(settings.backlog)  # clients may connect from now on; uvicorn takes them when it runs
        self._serving = self.spawn(self._server.serve(sockets=[listener]), "http")

    async def drain(self) -> None:
        """New calls get 503; open ones end normally."""
        if self._desk is not None:
            self._desk.is_draining = True
        if self._nats_door is not None:
            await self._nats_door.close()
        await self.sessions.drained()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)

    @property
    def desk(self) -> Desk:
        """There from `start` on."""
        assert self._desk is not None
        return self._desk

    def describe(self) -> WorkerLease:
        return msgspec.structs.replace(super().describe(), http_address=self._http_address)

    def detail(self) -> str:
        return f"http://{self._http_address}"

    def endpoints(self) -> Sequence[Endpoint]:
        return endpoints(self.subjects)

    def endpoint_stats(self) -> Mapping[str, Mapping[str, Any]]:
        return self._nats_door.stats() if self._nats_door is not None else {}


class _Server(uvicorn.Server):
    """Signals are the service's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """Bind before anything else is done: a taken port is found at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise EnvironmentFault(f"{host}:{port} cannot be bound: {error.strerror}", remedy="Use another port: SS_HTTP_PORT") from error
    return listener
