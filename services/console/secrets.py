"""`slipstream secrets`: what the containers of a stack must know of one another and nobody else, made once."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from services.console.findings import Finding, show
from services.console.run_folder import write_secret
from services.console.store_check import note_findings, store_findings
from services.console.terminal import Terminal
from services.console.usage import Parser
from shared.bus.permissions import USERS, render_server_config
from shared.errors import EnvironmentFault
from shared.messages.subjects import Subjects

CLUSTER = ("gateway", "kvstore")
"""Who shares the cluster secret."""


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = Parser(
        prog="slipstream secrets",
        description="Make one folder a NATS user with its password (and the cluster secret where it is needed), and nats/nats.conf with "
        "all of them. What is there already stays: run it before every start. Then look at what the nats-server will find on its disk; "
        "exit 3 if it cannot use that.",
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--namespace", default="ss")
    parser.add_argument("--store-dir", default="/data", help="where the nats-server keeps its streams (default /data)")
    options = parser.parse_args(argv)
    try:
        num_made = make_secrets(options.folder, options.namespace, options.store_dir)
    except OSError as error:
        owner = f"it must belong to uid {os.getuid()}, which this runs as"
        raise EnvironmentFault(f"{error.filename or options.folder}: {error.strerror}; {owner}", remedy="Remove the volume") from error
    sys.stdout.write(f"{options.folder}: {num_made} secrets made\n" if num_made else f"{options.folder}: all secrets are there\n")
    findings = check_store(options.folder, Path(options.store_dir), Subjects(options.namespace))
    terminal = Terminal()
    for finding in findings:
        show(finding, terminal)
    return EnvironmentFault.exit_code if any(finding.state == "failed" for finding in findings) else 0


def check_store(folder: Path, store_dir: Path, subjects: Subjects) -> list[Finding]:
    """What is on the disk of the nats-server that is started next; written down for `doctor`."""
    findings = store_findings(store_dir, subjects)
    note_findings(folder / "console", findings)
    return findings


def make_secrets(folder: Path, namespace: str, store_dir: str) -> int:
    """Files that others cannot read; those that are there are kept. Returns how many were made."""
    num_made = 0
    passwords = {}
    for user in USERS:
        passwords[user], made = _kept(folder / user / "password")
        num_made += made
    cluster = ""
    for role in CLUSTER:
        cluster, made = _kept(folder / role / "cluster", cluster)
        num_made += made
    server = render_server_config(
        subjects=Subjects(namespace),
        passwords=passwords,
        store_dir=store_dir,
        host="0.0.0.0",
        monitoring_port=8222,
        monitoring_host="0.0.0.0",
    )
    _replace(folder / "nats" / "nats.conf", server)
    return num_made


def _kept(path: Path, text: str = "") -> tuple[str, bool]:
    """What the file holds; absent, it is made with `text`, or with something random. (text, was made)"""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        return path.read_text().strip(), False
    except FileNotFoundError:
        made = text or secrets.token_hex(32)
        write_secret(path, made)
        return made, True


def _replace(path: Path, text: str) -> None:
    """Whole or not at all: the server may read it now."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    write_secret(beside, text)
    beside.rename(path)
