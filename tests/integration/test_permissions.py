"""The permission table against a real nats-server: what each user needs works, what it must not do is denied and counted (T45)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import nats
import pytest

from shared.bus.base import Message
from shared.bus.discovery import Endpoint, advertise
from shared.bus.nats import connect
from shared.bus.nats_bus import NatsBus
from shared.bus.permissions import USERS, User, permissions_of, render_server_config
from shared.bus.streams import provision
from shared.config import ServiceConfig
from shared.errors import BusError, BusTimeout, EnvironmentFault, NoResponders, PermissionDenied
from shared.messages.subjects import Subjects
from tests.support.nats import NatsServer
from tests.support.waiting import until

SUBJECTS = Subjects("ss")
SERVICES: tuple[User, ...] = ("gateway", "router", "prefill", "decode", "kvstore", "planner")
WORKER = "0123abcd"

Connect = Callable[[User], Awaitable[NatsBus]]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    text = render_server_config(
        subjects=SUBJECTS,
        passwords={user: f'pw {user} "quoted"' for user in USERS},
        store_dir=folder / "js",
        port=-1,
        ports_file_dir=folder,
    )
    server = NatsServer(folder, text.replace("{", "{{").replace("}", "}}").replace("port: -1", "port: {port}"))
    server.start()
    yield server
    server.close()


@pytest.fixture
async def connect_as(guarded: NatsServer, tmp_path: Path) -> AsyncIterator[Connect]:
    buses = []

    async def connect_user(user: User) -> NatsBus:
        password = tmp_path / user
        password.write_text(f'pw {user} "quoted"')
        config = ServiceConfig(nats_url=guarded.url, nats_user=user, nats_password_file=password)
        bus = await connect(config, name=user)
        buses.append(bus)
        return bus

    router = await connect_user("router")
    await provision(router, SUBJECTS)
    yield connect_user
    for bus in buses:
        await bus.close()


@pytest.fixture
def nothing_was_denied() -> Iterator[list[NatsBus]]:
    buses: list[NatsBus] = []
    yield buses
    assert [bus.counts["permission_denied"] for bus in buses] == [0] * len(buses)


# -- what each one needs ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("user", SERVICES)
async def test_every_service_can_live(user: User, connect_as: Connect, nothing_was_denied: list[NatsBus]) -> None:
    bus, router = await connect_as(user), await connect_as("router")
    nothing_was_denied += [bus, router]
    await provision(bus, SUBJECTS)
    leases = await bus.bucket(SUBJECTS.bucket("workers"))
    revision = await leases.create(f"{user}.{WORKER}", b"lease")
    revision = await leases.update(f"{user}.{WORKER}", b"lease", revision)
    assert await leases.get(f"{user}.{WORKER}")
    assert [entry.key for entry in await leases.entries()] == [f"{user}.{WORKER}"]
    watch = (await bus.bucket(SUBJECTS.bucket("config"))).watch()
    config = await router.bucket(SUBJECTS.bucket("config"))
    await config.put("router.idf", b"1")
    assert (await anext(watch)).key == "router.idf"
    await watch.aclose()  # type: ignore[attr-defined]
    await leases.delete(f"{user}.{WORKER}")
    advertisement = await advertise(bus, name=f"slipstream-{user}", version="1.0.0", instance=WORKER)
    console = await connect_as("console")
    found = [message async for message in _some(console, f"$SRV.PING.slipstream-{user}", 1)]
    assert len(found) == 1
    await advertisement.close()


async def test_a_request_goes_all_the_way(connect_as: Connect, nothing_was_denied: list[NatsBus]) -> None:
    """Every message of a request's way, sent and received by who has to."""
    gateway, router, prefill, decode, kvstore, planner, console = [await connect_as(user) for user in USERS if user != "client"]
    nothing_was_denied += [gateway, router, prefill, decode, kvstore, planner, console]

    async def served(server: NatsBus, subject: str, *callers: NatsBus) -> None:
        subscription = await server.serve(subject, _echo)
        for caller in callers:
            assert (await caller.request(subject, b"x", timeout_s=5)).payload == b"x"
        await subscription.close()

    async def heard(subject: str, sender: NatsBus, *listeners: NatsBus) -> None:
        subscriptions = [await listener.subscribe(subject) for listener in listeners]
        await sender.publish(subject, b"x")
        for subscription in subscriptions:
            assert (await anext(aiter(subscription))).payload == b"x"
            await subscription.close()

    async def queued(subject: str, stream: str, durable: str, sender: NatsBus, worker: NatsBus) -> None:
        assert await sender.enqueue(subject, b"x", msg_id=f"{subject}{id(sender)}")
        consumer = await worker.consume(stream, durable, subject, window=2)
        delivery = await consumer.next()
        await delivery.in_progress()
        await delivery.ack()
        await consumer.close(delete=True)

    subjects = SUBJECTS
    await queued(subjects.request("high", "ab"), subjects.stream("requests"), subjects.durable("requests", "high"), gateway, router)
    await queued(subjects.prefill(WORKER), subjects.stream("prefill"), subjects.durable("prefill", WORKER), router, prefill)
    for sender in (router, prefill):
        await queued(subjects.decode(WORKER), subjects.stream("decode"), subjects.durable("decode", WORKER), sender, decode)
    for verb in ("wanted", "finish"):
        await served(gateway, subjects.session("ab", verb), router, prefill, decode)  # type: ignore[arg-type]
    for sender in (router, prefill, decode):
        await heard(subjects.tokens("ab"), sender, gateway)
    for worker in (prefill, decode):
        await served(worker, subjects.worker(WORKER, "resend"), gateway)
        await served(worker, subjects.worker(WORKER, "snapshot"), router)
        await served(worker, subjects.worker(WORKER, "drain"), planner, console)
        await heard(subjects.load_event(WORKER), worker, gateway, router, planner, console)
        await heard(subjects.kv_event(WORKER), worker, router, planner)
        for verb in ("lookup", "reserve", "commit", "acquire", "release"):
            await served(kvstore, subjects.kv("ab", verb), worker)  # type: ignore[arg-type]
        config = await worker.bucket(subjects.bucket("config"))
        await config.put("model.0123456789abcdef", b"card")
    for verb in ("lookup", "prefetch", "snapshot"):
        await served(kvstore, subjects.kv("ab", verb), router)  # type: ignore[arg-type]
    await served(kvstore, subjects.kv("ab", "lookup"), console)
    await heard(subjects.kv_event("ab"), kvstore, router)
    await heard(subjects.cancel(), gateway, router, prefill, decode)
    await heard(subjects.route_event("ab"), router, router, planner)
    await served(router, subjects.router("ab", "snapshot"), router)
    await served(router, subjects.router("ab", "index"), console)
    await heard(subjects.plan(), planner, gateway, router, prefill, decode, kvstore)
    await (await planner.bucket(subjects.bucket("config"))).put("plan", b"x")
    assert await gateway.enqueue(subjects.usage_event("ab"), b"x", msg_id="u")
    await heard(subjects.usage_event("ab"), gateway, planner)
    await router.delete_durable(subjects.stream("decode"), subjects.durable("decode", WORKER), subjects.decode(WORKER))
    await router.on_dead_letter(subjects.stream("decode"), _forget)
    assert await router.enqueue(subjects.dead("decode"), b"x", msg_id="d")


async def test_a_client_with_nothing_of_ours(guarded: NatsServer, connect_as: Connect) -> None:
    """Ten lines of nats-py: the front doors and discovery."""
    gateway = await connect_as("gateway")
    subject = SUBJECTS.front_door("models")
    await gateway.serve(subject, _echo, queue="gateways")
    endpoint = Endpoint("models", subject, "gateways")
    await advertise(gateway, name="slipstream-gateway", version="1.0.0", instance=WORKER, endpoints=[endpoint])
    client = await nats.connect(guarded.url, user="client", password='pw client "quoted"')
    assert (await client.request(subject, b"x", timeout=5)).data == b"x"
    assert b"slipstream-gateway" in (await client.request("$SRV.INFO", b"", timeout=5)).data
    await client.close()


# -- what nobody may ----------------------------------------------------------------------------------------------------
def forgeries(user: User) -> list[str]:
    """Subjects that `user` must not publish to."""
    mine = {"prefill": "prefill", "decode": "decode"}.get(user, "")
    others = [role for role in SERVICES if role != user]
    leases = [f"$KV.ss_workers.{role}.{WORKER}" for role in others]
    store = [
        f"$JS.API.STREAM.{verb}.{name}" for verb in ("DELETE", "SNAPSHOT", "RESTORE") for name in ("SS_DECODE", "KV_ss_workers", "SS_USAGE")
    ]
    foreign = ["$JS.API.STREAM.CREATE.MINE", "$KV.ss_config.model.0123456789abcdef.x", "$SYS.REQ.SERVER.PING", "anything", "ss2.v1.cancel"]
    if user not in ("router",):
        store += ["$JS.API.STREAM.PURGE.SS_DECODE", "$JS.API.STREAM.MSG.GET.SS_REQUESTS", "$JS.API.STREAM.MSG.DELETE.SS_DECODE"]
        foreign += [SUBJECTS.route_event("ab"), SUBJECTS.prefill(WORKER), SUBJECTS.dead("decode"), "$KV.ss_config.router.idf"]
    if user not in ("router", "console"):
        store += ["$JS.API.STREAM.UPDATE.SS_DECODE"]
    if user not in ("router", "prefill"):
        foreign += [SUBJECTS.decode(WORKER)]
    if user != "gateway":
        foreign += [SUBJECTS.request("high", "ab"), SUBJECTS.cancel(), SUBJECTS.usage_event("ab")]
    if user not in ("router", "prefill", "decode"):
        foreign += [SUBJECTS.tokens("ab"), SUBJECTS.session("ab", "finish"), SUBJECTS.session("ab", "wanted")]
    if user != "planner":
        foreign += [SUBJECTS.plan(), "$KV.ss_config.plan"]
    for kind in ("prefill", "decode"):
        if kind != mine:
            foreign += [f"$JS.API.CONSUMER.MSG.NEXT.SS_{kind.upper()}.{kind}-{WORKER}", f"$JS.ACK.SS_{kind.upper()}.d.1.1.1.1.0"]
    return leases + store + foreign


@pytest.mark.parametrize("user", [*SERVICES, "console"])
async def test_forged_messages_are_denied(user: User, connect_as: Connect) -> None:
    bus = await connect_as(user)
    forged = forgeries(user)
    for number, subject in enumerate(forged):
        with pytest.raises(PermissionDenied) as caught:
            await bus.request(subject, b"", timeout_s=10)
        assert caught.value.subject == subject
        assert bus.counts["permission_denied"] == number + 1
    assert bus.is_connected


@pytest.mark.parametrize("user", SERVICES)
@pytest.mark.parametrize("subject", [">", "ss.v1.>", "_INBOX.>", "_INBOX_console.>", "$JS.API.>", "$KV.>", "$JS.ACK.>", "$SYS.>", "other"])
async def test_nobody_listens_to_what_is_not_his(user: User, subject: str, connect_as: Connect) -> None:
    bus = await connect_as(user)
    with pytest.raises(PermissionDenied):
        await bus.subscribe(subject)
    for other in USERS:
        if other != user:
            with pytest.raises(PermissionDenied):
                await bus.subscribe(f"_INBOX_{other}.>")


async def test_what_a_client_may_not(guarded: NatsServer) -> None:
    errors: list[str] = []

    async def note(error: Exception) -> None:
        errors.append(str(error).lower())

    client = await nats.connect(guarded.url, user="client", password='pw client "quoted"', error_cb=note)
    heard: list[object] = []

    async def hear(message: object) -> None:
        heard.append(message)

    for subject in (">", "ss.v1.tokens.*", "ss.v1.request.>", "_INBOX_gateway.>", "$KV.>", "ss.v1.generate"):
        await client.subscribe(subject, cb=hear)
    for subject in ("ss.v1.cancel", "ss.v1.request.high.ab", "$KV.ss_config.plan", "$JS.API.STREAM.LIST", "$JS.API.STREAM.DELETE.SS_USAGE"):
        await client.publish(subject, b"x")
    await client.flush()
    await until(lambda: len(errors) == 11)
    assert all("permissions violation" in error for error in errors)
    assert heard == []
    await client.close()


@pytest.mark.parametrize(("user", "password"), [("", ""), ("gateway", ""), ("gateway", "x"), ("nobody", "x"), ("SYS", "")])
async def test_without_a_password_there_is_no_connection(user: str, password: str, guarded: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(password)
    config = ServiceConfig(nats_url=guarded.url, nats_user=user, nats_password_file=tmp_path / "password")
    with pytest.raises(EnvironmentFault, match="does not accept"):
        await connect(config, name="test", wait_s=20)


async def test_a_responder_cannot_be_made_to_forge(guarded: NatsServer, connect_as: Connect) -> None:
    """A client names one of our own subjects as its reply subject."""
    gateway, router = await connect_as("gateway"), await connect_as("router")
    await gateway.serve(SUBJECTS.front_door("models"), _echo)
    cancels = await router.subscribe(SUBJECTS.cancel())
    client = await nats.connect(guarded.url, user="client", password='pw client "quoted"')
    await client.publish(SUBJECTS.front_door("models"), b"x", reply=SUBJECTS.cancel())
    await client.flush()
    await until(lambda: gateway.counts["reply_refused"] == 1)
    await gateway.publish(SUBJECTS.cancel(), b"mine")
    assert (await anext(aiter(cancels))).payload == b"mine"
    await client.close()


def test_the_table_names_every_user() -> None:
    for user in USERS:
        permissions = permissions_of(user, SUBJECTS)
        assert ">" not in permissions.publish + permissions.subscribe
        assert len(set(permissions.publish)) == len(permissions.publish)


async def _echo(message: Message) -> bytes:
    return message.payload


async def _forget(payload: bytes, subject: str) -> None:
    return None


async def _some(bus: NatsBus, subject: str, count: int) -> AsyncIterator[Message]:
    replies = bus.request_many(subject, b"", stall_s=5)
    with suppress(BusTimeout, NoResponders, BusError):
        for _ in range(count):
            yield await anext(replies)
    await asyncio.sleep(0)
