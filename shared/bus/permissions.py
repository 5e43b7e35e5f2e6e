"""Who may publish and subscribe what: one user a service, allow lists only.

Ids change at every start, so a list cannot name the instance, and a worker could send tokens as another worker. The gateway therefore
accepts an epoch from one instance only, and services' inboxes carry random tokens that no other user can read. NATS clients share one user,
so whoever has its password can listen to the answers of all of them: give those who must not a NATS account or user of their own.
tests/integration/test_permissions.py tries every right and the wrongs that matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec

from shared.bus.start import inbox_prefix_of
from shared.bus.streams import BUCKET_PREFIX, stream_specs
from shared.messages.subjects import FrontDoor, KvVerb, Subjects

User = Literal["gateway", "router", "prefill", "decode", "kvstore", "planner", "console", "client"]
USERS: tuple[User, ...] = ("gateway", "router", "prefill", "decode", "kvstore", "planner", "console", "client")

API = "$JS.API"
MIB = 2**20
MAX_PAYLOAD_BYTES = MIB
_ENVIRONMENT = re.compile(r"\$[A-Z_][A-Z0-9_]*")


@dataclass(frozen=True, slots=True)
class Permissions:
    """Allow lists; everything else is denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions_of(user: User, subjects: Subjects) -> Permissions:
    """The allow lists of one user in one deployment."""
    if user == "client":
        return _client(subjects)
    own_inbox = f"{inbox_prefix_of(user)}.>"
    publish, subscribe = _OWN[user](subjects)
    if user == "console":
        every = [*_provisioning(subjects), *(f"{API}.STREAM.UPDATE.{spec.name}" for spec in stream_specs(subjects)), *_reading(subjects)]
        return Permissions((*every, own_inbox, *publish), (own_inbox, *subscribe))
    lease = f"$KV.{subjects.bucket('workers')}.{user}.*"
    every = [*_provisioning(subjects), *_reading(subjects), lease, *_every_inbox()]
    return Permissions((*every, *publish), (own_inbox, "$SRV.>", subjects.plan(), *subscribe))


def render_server_config(
    *,
    subjects: Subjects,
    passwords: Mapping[User, str],
    store_dir: Path | str,
    host: str = "127.0.0.1",
    port: int = 4222,
    monitoring_port: int | None = -1,
    monitoring_host: str = "127.0.0.1",
    max_memory_bytes: int = 512 * MIB,
    max_file_bytes: int = 1024 * MIB,
    ports_file_dir: Path | str | None = None,
) -> str:
    """A configuration of nats-server with one user for each entry of `passwords`.

    Port -1 is any free port; `monitoring_port` None: no monitoring. A password `$NAME` is read from the server's environment; a bcrypt hash
    is taken as such. Host and paths stand in quotes, as JSON writes them.
    """
    lines = [
        'server_name: "slipstream"',
        f"host: {_quoted(host)}",
        f"port: {port}",
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        "max_connections: 4096",
        'ping_interval: "2s"',
        "ping_max: 2",
        'write_deadline: "5s"',
        'lame_duck_duration: "30s"',
        'lame_duck_grace_period: "2s"',
    ]
    if monitoring_port is not None:
        lines.append(f'http: "{monitoring_host}:{monitoring_port}"')
    if ports_file_dir is not None:
        lines.append(f"ports_file_dir: {_quoted(ports_file_dir)}")
    lines.append(f"jetstream {{ store_dir: {_quoted(store_dir)}, max_mem: {max_memory_bytes}, max_file: {max_file_bytes} }}")
    lines.append("accounts {")
    lines.append("  SYS {}")
    lines.append("  APP {")
    lines.append("    jetstream: enabled")
    lines.append("    users: [")
    lines += [_user_line(user, password, permissions_of(user, subjects)) for user, password in passwords.items()]
    lines += ["    ]", "  }", "}", "system_account: SYS", ""]
    return "\n".join(lines)


# -- the table --------------------------------------------------------------------------------------------------------
def _gateway(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish = [
        subjects.request("*", "*"),
        subjects.worker("*", "resend"),
        subjects.cancel(),
        subjects.usage_event("*"),
    ]
    subscribe = [
        subjects.tokens("*"),
        subjects.session("*", "wanted"),
        subjects.session("*", "finish"),
        *(subjects.front_door(door) for door in get_args(FrontDoor)),
        subjects.load_event("*"),
    ]
    return publish, subscribe


def _router(subjects: Subjects) -> tuple[list[str], list[str]]:
    tasks = [subjects.stream("prefill"), subjects.stream("decode")]
    queues = [subjects.stream("requests"), *tasks]
    publish = [
        subjects.prefill("*"),
        subjects.decode("*"),
        subjects.tokens("*"),
        subjects.session("*", "wanted"),
        subjects.session("*", "finish"),
        subjects.worker("*", "snapshot"),
        subjects.router("*", "snapshot"),
        *(subjects.kv("*", verb) for verb in ("lookup", "prefetch", "snapshot")),
        subjects.route_event("*"),
        *(subjects.dead(name) for name in ("requests", "prefill", "decode")),
        *_consuming(subjects.stream("requests")),
        *(f"{API}.CONSUMER.DELETE.{stream}.*" for stream in tasks),
        *(f"{API}.STREAM.PURGE.{stream}" for stream in tasks),
        *(f"{API}.STREAM.MSG.{verb}.{stream}" for stream in queues for verb in ("GET", "DELETE")),
        *(f"{API}.STREAM.UPDATE.{spec.name}" for spec in stream_specs(subjects)),
        f"$KV.{subjects.bucket('config')}.router.>",
    ]
    subscribe = [
        subjects.cancel(),
        subjects.kv_event("*"),
        subjects.route_event("*"),
        subjects.load_event("*"),
        subjects.router("*", "snapshot"),
        subjects.router("*", "index"),
        *(f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.*" for stream in queues),
    ]
    return publish, subscribe


def _worker(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish = [
        subjects.tokens("*"),
        subjects.session("*", "wanted"),
        subjects.session("*", "finish"),
        *(subjects.kv("*", verb) for verb in ("lookup", "reserve", "commit", "acquire", "release", "prefetch")),
        subjects.load_event("*"),
        subjects.kv_event("*"),
        f"$KV.{subjects.bucket('config')}.model.*",
    ]
    subscribe = [subjects.cancel(), *(subjects.worker("*", verb) for verb in ("resend", "snapshot", "drain"))]
    return publish, subscribe


def _prefill(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish, subscribe = _worker(subjects)
    return [*publish, subjects.decode("*"), *_consuming(subjects.stream("prefill"))], subscribe


def _decode(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish, subscribe = _worker(subjects)
    return [*publish, *_consuming(subjects.stream("decode"))], subscribe


def _kvstore(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish = [subjects.kv_event("*"), *(subjects.kv("*", verb) for verb in ("lookup", "acquire", "release", "prefetch"))]
    return publish, [*(subjects.kv("*", verb) for verb in get_args(KvVerb)), subjects.cancel()]


def _planner(subjects: Subjects) -> tuple[list[str], list[str]]:
    config = subjects.bucket("config")
    publish = [
        subjects.plan(),
        f"$KV.{config}.plan",
        f"$KV.{config}.planner.>",
        subjects.worker("*", "drain"),
        *_consuming(subjects.stream("usage")),
    ]
    subscribe = [subjects.load_event("*"), subjects.route_event("*"), subjects.kv_event("*"), subjects.usage_event("*")]
    return publish, subscribe


def _console(subjects: Subjects) -> tuple[list[str], list[str]]:
    publish = [
        "$SRV.>",
        *(subjects.front_door(door) for door in get_args(FrontDoor)),
        subjects.router("*", "index"),
        subjects.worker("*", "drain"),
        subjects.kv("*", "lookup"),
        *_consuming(subjects.stream("usage")),
        f"{API}.STREAM.NAMES",
        f"{API}.STREAM.LIST",
        f"{API}.STREAM.INFO.*",
        f"{API}.CONSUMER.LIST.*",
    ]
    everything = f"{subjects.namespace}.v1.>"
    return publish, [everything, "$SRV.>", "$JS.EVENT.ADVISORY.>"]


_OWN = {
    "gateway": _gateway,
    "router": _router,
    "prefill": _prefill,
    "decode": _decode,
    "kvstore": _kvstore,
    "planner": _planner,
    "console": _console,
}


def _client(subjects: Subjects) -> Permissions:
    """Any NATS client with its usual inbox: the front doors, and discovery."""
    doors = [subjects.front_door(door) for door in get_args(FrontDoor)]
    discovery = [f"$SRV.{verb}{rest}" for verb in ("PING", "INFO", "STATS") for rest in ("", ".>")]
    return Permissions((*doors, *discovery), ("_INBOX.>", f"{inbox_prefix_of('client')}.>"))


# -- what several need ------------------------------------------------------------------------------------------------
def _provisioning(subjects: Subjects) -> list[str]:
    """Make wiped streams and buckets again. Not: change, purge or delete one."""
    return [f"{API}.INFO", *(f"{API}.STREAM.CREATE.{spec.name}" for spec in stream_specs(subjects))]


def _reading(subjects: Subjects) -> list[str]:
    """Get and watch both buckets."""
    streams = [BUCKET_PREFIX + subjects.bucket(name) for name in ("workers", "config")]
    return [f"{API}.DIRECT.GET.{stream}.>" for stream in streams] + [
        f"{API}.CONSUMER.{verb}" for stream in streams for verb in (f"CREATE.{stream}.>", f"MSG.NEXT.{stream}.*", f"DELETE.{stream}.*")
    ]


def _consuming(stream: str) -> list[str]:
    """A durable of one's own in `stream`."""
    verbs = [f"CREATE.{stream}.>", f"MSG.NEXT.{stream}.*", f"DELETE.{stream}.*"]
    return [*(f"{API}.CONSUMER.{verb}" for verb in verbs), f"$JS.ACK.{stream}.>"]


def _every_inbox() -> list[str]:
    """Whom a service may answer. (`allow_responses` would let a caller name any subject.)"""
    return ["_INBOX.>", *(f"{inbox_prefix_of(user)}.>" for user in USERS)]


def _user_line(user: str, password: str, permissions: Permissions) -> str:
    secret = password if _ENVIRONMENT.fullmatch(password) else _quoted(password)
    publish = msgspec.json.encode(permissions.publish).decode()
    subscribe = msgspec.json.encode(permissions.subscribe).decode()
    return (
        f"      {{ user: {_quoted(user)}, password: {secret},\n"
        f"        permissions: {{ publish: {{ allow: {publish} }},\n"
        f"                       subscribe: {{ allow: {subscribe} }} }} }}"
    )


def _quoted(text: Path | str) -> str:
    return msgspec.json.encode(str(text)).decode()
