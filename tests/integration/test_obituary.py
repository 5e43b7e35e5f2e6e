"""What `up` does when one of its processes dies: its lease goes, and nobody else's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.console.obituary import Obituaries
from services.console.run_folder import Run
from shared.bus.streams import provision
from shared.messages.codec import encode
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects
from tests.support.nats import NatsServer, connect_to, delete_streams
from tests.support.waiting import until


def run_at(url: str, namespace: str, folder: Path) -> Run:
    return Run(folder=folder, pid=1, pid_start=1, version="0", namespace=namespace, nats_url=url)


async def test_the_lease_of_the_dead_goes_and_that_of_its_next_life_stays(
    nats_server: NatsServer, subjects: Subjects, tmp_path: Path
) -> None:
    bus = await connect_to(nats_server.url, subjects.namespace)
    await provision(bus, subjects)
    bucket = await bus.bucket(subjects.bucket("workers"))
    obituaries = Obituaries(run_at(nats_server.url, subjects.namespace, tmp_path), {})
    while True:
        put_s, soon_ns = time.monotonic(), time.time_ns() + 60 * 10**9
        for instance, name, started_ns in (("00000001", "decode-0", 1), ("00000002", "decode-1", 1), ("00000003", "decode-0", soon_ns)):
            await bucket.put(f"decode.{instance}", encode(WorkerLease(instance, name, "decode", "ready", 1, "0", started_ns)))
        await bucket.put("decode.00000004", b"not a lease")
        obituaries.tell("decode-0", "decode")
        while "decode.00000001" in (left := {entry.key for entry in await bucket.entries() if entry.value}):
            pass
        if left == {f"decode.0000000{number}" for number in (2, 3, 4)}:
            break
        assert time.monotonic() - put_s > 2, "leases that nobody renews end by themselves after 3 s, and not before"
    await obituaries.close()
    await bus.close()
    await delete_streams(nats_server.url, subjects.namespace)


async def test_without_nats_nothing_is_told_and_nothing_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    obituaries = Obituaries(run_at("nats://127.0.0.1:1", "ss", tmp_path), {})
    obituaries.tell("decode-0", "decode")
    await until(lambda: "the end of decode-0 could not be told" in caplog.text)
    await obituaries.close()


async def test_closing_leaves_nothing_behind(tmp_path: Path) -> None:
    obituaries = Obituaries(run_at("nats://127.0.0.1:1", "ss", tmp_path), {})
    obituaries.tell("decode-0", "decode")
    await obituaries.close()
