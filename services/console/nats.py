"""`slipstream nats`: the services as the NATS services API shows them, for machines without the `nats` command line."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, get_args
from urllib.parse import quote, urlsplit

import msgspec

from services.console.fleet_view import visit
from services.console.run_folder import Run, add_run_flags, find_run, state_dir
from services.console.terminal import Terminal, age_text, narrowed
from services.console.usage import Parser, number, whole_number
from shared.bus.base import Bus, Message
from shared.bus.permissions import USERS, render_server_config
from shared.errors import BusTimeout, NoResponders, SlipstreamError
from shared.messages.subjects import Subjects
from shared.types import Role

_CONFIG_HEAD = """\
# Made by `slipstream nats config`: one user a service, allow lists only. Each password is an environment variable of nats-server,
# SS_NATS_PASSWORD_<USER>; the service is told the same by SS_NATS_USER and SS_NATS_PASSWORD_FILE.
"""
_NUMBERS = {"RTT": 0, "Requests": 0, "Errors": 0, "Processing Time": 0, "Average Time": 0}
_STALL_S = 0.5
"""Silence after which no more answers are expected."""


def run(argv: Sequence[str]) -> int:
    """The command. Exit 1 if nobody answers."""
    options = _parser().parse_args(argv)
    if options.verb == "config":
        sys.stdout.write(server_config(options.namespace, options.store_dir))
        return 0
    stack = find_run(state_dir(options.state_dir), options.run)
    if options.verb == "url":
        url = url_with_user(stack)
        sys.stdout.write((msgspec.json.encode({"url": url}).decode() if options.json else url) + "\n")
        return 0
    return asyncio.run(_look(stack, options))


def _parser() -> Parser:
    parser = Parser(
        prog="slipstream nats", description="Look at the services over NATS ($SRV). `nats micro …` shows the same where it is installed."
    )
    common = Parser(add_help=False)
    add_run_flags(common)
    common.add_argument("--json", action="store_true", help="the answers as they are, a line each")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("url", parents=[common], help="the address with the client's user and password, for your own program")
    config = verbs.add_parser("config", help="a configuration for your own nats-server: one user a service, passwords from its environment")
    config.add_argument("--namespace", default="ss")
    config.add_argument("--store-dir", default="/data", help="where JetStream keeps its streams (default /data)")
    for verb, text in (
        ("ls", "list services"),
        ("ping", "measure the way there"),
        ("info", "endpoints"),
        ("stats", "requests, errors, times"),
    ):
        about = verbs.add_parser(verb, parents=[common], help=text)
        about.add_argument("service", nargs="?", type=_service, default="", help="only this one: slipstream-decode, or decode")
    request = verbs.add_parser("req", parents=[common], help="send a request, show the answer")
    request.add_argument("subject", type=_subject)
    request.add_argument("body", nargs="?", default="", help="- reads it from stdin")
    request.add_argument(
        "--replies", type=whole_number(0, 10**9), default=1, metavar="N", help="answers to wait for; 0: all, until the empty one (a stream)"
    )
    request.add_argument(
        "-H", "--header", type=_header, action="append", default=[], metavar="NAME:VALUE", help="for example 'Authorization: Bearer ss-…'"
    )
    request.add_argument("--timeout", type=number(0.001, 86_400), default=60.0, metavar="S", help="silence that ends the wait (default 60)")
    return parser


def _service(text: str) -> str:
    """The whole name of a service, of which the beginning may be left out."""
    if not re.fullmatch(r"[A-Za-z0-9_-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a service\nslipstream nats ls shows them")
    return f"slipstream-{text}" if text in get_args(Role) else text


def _subject(text: str) -> str:
    if not re.fullmatch(r"[^\s.*>]+(\.[^\s.*>]+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no subject to ask: words with dots between them\nFor example: ss.v1.models")
    return text


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(r"[ -~]*", value):
        raise argparse.ArgumentTypeError(f"{text!r} is no header: a name, a colon and a value\nFor example: Authorization: Bearer ss-…")
    return name, value.strip()


def server_config(namespace: str, store_dir: str) -> str:
    """A nats-server's configuration that reads the passwords SS_NATS_PASSWORD_<USER> from the server's environment."""
    passwords = {user: f"$SS_NATS_PASSWORD_{user.upper()}" for user in USERS}
    subjects = Subjects(namespace)
    return _CONFIG_HEAD + render_server_config(
        subjects=subjects, passwords=passwords, store_dir=store_dir, host="0.0.0.0", monitoring_port=8222, monitoring_host="0.0.0.0"
    )


def url_with_user(stack: Run) -> str:
    """`nats://client:password@host:port`: what a client program connects to. Of several servers, each with the login."""
    user, password = stack.nats_client_user, ""
    if stack.nats_client_password_file:
        password = stack.nats_client_password_file.read_text().strip()
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user else ""
    urls = [
        urlsplit(one.strip() if "://" in one else f"nats://{one.strip()}") for one in (stack.nats_client_url or stack.nats_url).split(",")
    ]
    return ",".join(f"{parts.scheme}://{login}{parts.netloc}" for parts in urls)


async def _look(stack: Run, options: argparse.Namespace) -> int:
    terminal = Terminal()
    async with visit(stack) as (bus, _):
        if options.verb == "req":
            return await _request(bus, terminal, options)
        verb = {"ls": "INFO"}.get(options.verb, options.verb.upper())
        answers = [answer async for answer in _ask(bus, f"$SRV.{verb}" + (f".{options.service}" if options.service else ""))]
    if options.json:
        for answer in answers:
            terminal.say(msgspec.json.encode(answer).decode())
    elif answers and options.verb in ("info", "stats") and not any(answer.get("endpoints") for answer in answers):
        terminal.say(f"{', '.join(sorted({answer['name'] for answer in answers}))}: no endpoints for clients, those of the gateway are")
    elif answers:
        answers.sort(key=lambda answer: (answer["name"], answer["id"]))
        for line in narrowed(_ROWS[options.verb](answers), terminal.columns, ("Version",), _NUMBERS):
            terminal.say(line)
    else:
        terminal.say(f"{terminal.mark('warning')} no service {f'called {options.service} ' if options.service else ''}answers")
    return 0 if answers else 1


async def _ask(bus: Bus, subject: str) -> AsyncIterator[dict[str, Any]]:
    """Every answer to a discovery request, with the ms it took as `rtt_ms`."""
    began_s = time.monotonic()
    try:
        async for message in bus.request_many(subject, b"", stall_s=_STALL_S):
            if message.payload:
                answer: dict[str, Any] = msgspec.json.decode(message.payload)
                yield {**answer, "rtt_ms": (time.monotonic() - began_s) * 1e3}
    except (BusTimeout, NoResponders):
        return  # silence ends the list: nobody knows how many there are


async def _request(bus: Bus, terminal: Terminal, options: argparse.Namespace) -> int:
    """Show `--replies` answers (0: all until the empty one)."""
    body = sys.stdin.read() if options.body == "-" else options.body
    num_left = options.replies
    async for message in bus.request_many(options.subject, body.encode(), stall_s=options.timeout, headers=dict(options.header)):
        _raise_service_error(message)
        if message.payload:
            terminal.say(message.payload.decode(errors="replace"))
        num_left -= 1
        if num_left == 0:
            break
    return 0


def _raise_service_error(message: Message) -> None:
    text = message.headers.get("nats-service-error")
    if text:
        raise SlipstreamError(f"{text} ({message.headers.get('nats-service-error-code', 'no code')})")


def _ls_rows(answers: list[dict[str, Any]]) -> list[Sequence[str]]:
    return [("Name", "Version", "ID", "Description"), *((a["name"], a["version"], a["id"], a.get("description", "")) for a in answers)]


def _ping_rows(answers: list[dict[str, Any]]) -> list[Sequence[str]]:
    return [("Name", "ID", "RTT"), *((a["name"], a["id"], f"{a['rtt_ms']:.1f} ms") for a in answers)]


def _info_rows(answers: list[dict[str, Any]]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("Name", "ID", "Endpoint", "Subject", "Queue Group")]
    for answer in answers:
        rows += [(answer["name"], answer["id"], e["name"], e["subject"], e.get("queue_group", "")) for e in answer.get("endpoints", [])]
    return rows


def _stats_rows(answers: list[dict[str, Any]]) -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [("ID", "Endpoint", "Requests", "Queue Group", "Errors", "Processing Time", "Average Time")]
    for answer in answers:
        for endpoint in answer.get("endpoints", []):
            total_s = endpoint.get("processing_time", 0) / 1e9
            rows.append(
                (
                    answer["id"],
                    endpoint["name"],
                    str(endpoint.get("num_requests", 0)),
                    endpoint.get("queue_group", ""),
                    str(endpoint.get("num_errors", 0)),
                    f"{total_s:.2f}s" if total_s < 60 else age_text(total_s),
                    f"{endpoint.get('average_processing_time', 0) / 1e6:.1f} ms",
                )
            )
    return rows


_ROWS = {"ls": _ls_rows, "ping": _ping_rows, "info": _info_rows, "stats": _stats_rows}
