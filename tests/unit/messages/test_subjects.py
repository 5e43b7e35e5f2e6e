from __future__ import annotations

import inspect
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.messages.subjects import Subjects

NOT_IDS = [
    "", ".", "a.b", "a b", "a\tb", "a\r\nPUB x 1", "ab\n", "A", "é", "a>", ">", "**", "a*", "$JS", "_INBOX", "a" * 33, "a/b", "a-b", "\x00",
    None, 7, b"ab", ["ab"],
]  # fmt: skip

ALL = {
    "request": "ss.v1.request.high.ab",
    "prefill": "ss.v1.prefill.ab",
    "decode": "ss.v1.decode.ab",
    "tokens": "ss.v1.tokens.ab",
    "session": "ss.v1.session.ab.wanted",
    "worker": "ss.v1.worker.ab.resend",
    "router": "ss.v1.router.ab.snapshot",
    "cancel": "ss.v1.cancel",
    "kv": "ss.v1.kv.ab.lookup",
    "kv_event": "ss.v1.event.kv.ab",
    "route_event": "ss.v1.event.route.ab",
    "load_event": "ss.v1.event.load.ab",
    "usage_event": "ss.v1.event.usage.ab",
    "plan": "ss.v1.plan",
    "dead": "ss.v1.dead.decode",
    "front_door": "ss.v1.generate",
    "stream": "SS_REQUESTS",
    "durable": "decode-ab",
    "bucket": "ss_workers",
}
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "request": ("high", "ab"),
    "session": ("ab", "wanted"),
    "worker": ("ab", "resend"),
    "router": ("ab", "snapshot"),
    "cancel": (),
    "kv": ("ab", "lookup"),
    "plan": (),
    "dead": ("decode",),
    "front_door": ("generate",),
    "stream": ("requests",),
    "durable": ("decode", "ab"),
    "bucket": ("workers",),
}


def build(subjects: Subjects, name: str, arguments: tuple[Any, ...]) -> str:
    return str(getattr(subjects, name)(*arguments))


@pytest.mark.parametrize("name", ALL)
def test_names(name: str) -> None:
    assert build(Subjects(), name, ARGUMENTS.get(name, ("ab",))) == ALL[name]


def test_every_method_is_tested() -> None:
    methods = {name for name, _ in inspect.getmembers(Subjects, inspect.isfunction) if not name.startswith("_")}
    assert methods == set(ALL)


@pytest.mark.parametrize("name", [name for name in ALL if ARGUMENTS.get(name) != ()])
def test_nothing_but_ids(name: str) -> None:
    good = ARGUMENTS.get(name, ("ab",))
    for position in range(len(good)):
        for bad in NOT_IDS:
            with pytest.raises((ValueError, TypeError)):
                build(Subjects(), name, (*good[:position], bad, *good[position + 1 :]))


def test_a_wildcard_for_subscriptions() -> None:
    assert Subjects().load_event("*") == "ss.v1.event.load.*"
    assert Subjects().request("*", "*") == "ss.v1.request.*.*"


def test_another_namespace_shares_nothing() -> None:
    ours, theirs = Subjects("ss"), Subjects("blue2")
    for name in ALL:
        arguments = ARGUMENTS.get(name, ("ab",))
        if name != "durable":  # of a stream, whose name differs
            assert build(ours, name, arguments) != build(theirs, name, arguments)
    assert theirs.decode("ab") == "blue2.v1.decode.ab"
    assert theirs.stream("decode") == "BLUE2_DECODE"
    assert theirs.bucket("config") == "blue2_config"


@pytest.mark.parametrize("namespace", ["", "SS", "a.b", "a-b", "a_b", ">", "*", "a" * 17, "é", "ss\n"])
def test_not_a_namespace(namespace: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Subjects(namespace)
    assert caught.value.variable == "SS_NAMESPACE"
