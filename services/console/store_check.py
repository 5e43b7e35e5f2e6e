"""What NATS will find on its disk: looked at before it starts, because of itself it says little, and `doctor` cannot see it later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from services.console.bus_findings import other_rules
from services.console.bus_look import StreamConfig
from services.console.findings import Finding
from shared.bus.streams import stream_specs
from shared.messages.subjects import Subjects

NOTE = "setup.json"
"""Beside the console's password."""


def store_findings(store_dir: Path, subjects: Subjects) -> list[Finding]:
    """Of the folder that nats-server is given; [] where there is none yet, or nothing to say. Messages are not read."""
    if not store_dir.exists():
        return []
    foreign = list(_foreign(store_dir))
    return foreign or [*_streams(store_dir, subjects)]


def note_findings(folder: Path, findings: list[Finding]) -> None:
    """For `noted_findings`. OSError as from any file."""
    (folder / NOTE).write_bytes(msgspec.json.encode(findings))


def noted_findings(folder: Path) -> list[Finding]:
    """What was found before the last start; [] where nothing was written down."""
    try:
        return msgspec.json.decode((folder / NOTE).read_bytes(), type=list[Finding])
    except (OSError, msgspec.MsgspecError):
        return []


def _foreign(store_dir: Path) -> Iterator[Finding]:
    """The first thing that may not be read and written."""
    for path in (store_dir, *(Path(folder, name) for folder, names, files in os.walk(store_dir) for name in (*names, *files))):
        need = os.R_OK | os.W_OK | (os.X_OK if path.is_dir() else 0)
        if not os.access(path, need):
            yield Finding(
                "failed",
                f"NATS cannot use its data: {path} belongs to uid {path.lstat().st_uid}, and it runs as uid {os.getuid()}",
                f"chown -R {os.getuid()} the volume that is {store_dir}, or remove it: only usage records and dead letters go with it",
            )
            return


def _streams(store_dir: Path, subjects: Subjects) -> Iterator[Finding]:
    """Streams of ours that are damaged, or of another version."""
    specs = {spec.name: spec for spec in stream_specs(subjects)}
    for path in sorted(store_dir.glob("jetstream/*/streams/*/meta.inf")):
        name = path.parent.name
        if name not in specs:
            continue
        try:
            config = msgspec.json.decode(path.read_bytes(), type=StreamConfig)
        except msgspec.MsgspecError:
            yield Finding(
                "warning",
                f"the data of stream {name} were damaged before the last start: NATS leaves them out, and the stream begins anew, empty",
                f"Nothing, if what it held may go; else put a copy of {path.parent} there while the stack is stopped",
            )
            continue
        yield from other_rules(specs[name], config)
