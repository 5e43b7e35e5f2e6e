"""Every subject, stream, durable and bucket name, and nothing else builds one.

Parts are ids that we mint (hex) or words of fixed sets; user text never becomes part of a subject.
"""

from __future__ import annotations

import re
from typing import Literal

from shared.errors import ConfigError
from shared.types import RequestClass

REQUEST_CLASSES: tuple[RequestClass, ...] = ("high", "normal", "batch")
SessionVerb = Literal["wanted", "finish"]
WorkerVerb = Literal["resend", "snapshot", "drain"]
RouterVerb = Literal["snapshot", "index"]
KvVerb = Literal["lookup", "reserve", "commit", "acquire", "release", "prefetch", "snapshot"]
FrontDoor = Literal["generate", "embed", "models"]

_NAMESPACE = re.compile(r"[a-z0-9]{1,16}")
_TOKEN = re.compile(r"[a-z0-9]{1,32}|\*")


def _token(part: str) -> str:
    """A subject token: an id or `*`. Anything else is a bug in the caller, and must never reach the wire."""
    if not _TOKEN.fullmatch(part):
        raise ValueError(f"{part!r} cannot be a subject token")
    return part


class Subjects:
    """The names of one deployment. `namespace` stands in place of `ss`, so that two deployments can share a NATS."""

    def __init__(self, namespace: str = "ss") -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise ConfigError("SS_NAMESPACE", namespace, "must be 1 to 16 of a-z and 0-9")
        self.namespace = namespace
        self._root = f"{namespace}.v1"

    # -- work queues ----------------------------------------------------------------------------------------------
    def request(self, request_class: RequestClass | Literal["*"], model: str) -> str:
        return f"{self._root}.request.{_token(request_class)}.{_token(model)}"

    def prefill(self, worker: str) -> str:
        return f"{self._root}.prefill.{_token(worker)}"

    def decode(self, worker: str) -> str:
        return f"{self._root}.decode.{_token(worker)}"

    # -- sessions -------------------------------------------------------------------------------------------------
    def tokens(self, gateway: str) -> str:
        return f"{self._root}.tokens.{_token(gateway)}"

    def session(self, gateway: str, verb: SessionVerb) -> str:
        return f"{self._root}.session.{_token(gateway)}.{_token(verb)}"

    def worker(self, worker: str, verb: WorkerVerb) -> str:
        return f"{self._root}.worker.{_token(worker)}.{_token(verb)}"

    def router(self, router: str, verb: RouterVerb) -> str:
        return f"{self._root}.router.{_token(router)}.{_token(verb)}"

    def cancel(self) -> str:
        return f"{self._root}.cancel"

    # -- cache ----------------------------------------------------------------------------------------------------
    def kv(self, host: str, verb: KvVerb) -> str:
        return f"{self._root}.kv.{_token(host)}.{_token(verb)}"

    def kv_event(self, source: str) -> str:
        return f"{self._root}.event.kv.{_token(source)}"

    # -- events ---------------------------------------------------------------------------------------------------
    def route_event(self, router: str) -> str:
        return f"{self._root}.event.route.{_token(router)}"

    def load_event(self, worker: str) -> str:
        return f"{self._root}.event.load.{_token(worker)}"

    def usage_event(self, gateway: str) -> str:
        return f"{self._root}.event.usage.{_token(gateway)}"

    def plan(self) -> str:
        return f"{self._root}.plan"

    def dead(self, stream: str) -> str:
        """`stream` is a key of `streams`: requests, prefill, decode."""
        return f"{self._root}.dead.{_token(stream)}"

    # -- clients --------------------------------------------------------------------------------------------------
    def front_door(self, door: FrontDoor) -> str:
        return f"{self._root}.{_token(door)}"

    # -- streams, durables, buckets -------------------------------------------------------------------------------
    def stream(self, name: Literal["requests", "prefill", "decode", "usage", "dead"]) -> str:
        return f"{self.namespace.upper()}_{_token(name).upper()}"

    def durable(self, kind: Literal["requests", "prefill", "decode"], part: str) -> str:
        """`part`: the request class (shared by the routers), or the worker."""
        return f"{_token(kind)}-{_token(part)}"

    def bucket(self, name: Literal["workers", "config"]) -> str:
        return f"{self.namespace}_{_token(name)}"
