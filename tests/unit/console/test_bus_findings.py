from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from services.console.bus_findings import bus_findings, card_findings, clock_findings
from services.console.bus_look import BusLook, Stream, StreamConfig, StreamState
from services.console.findings import Finding
from shared.bus.streams import MAX_TASKS_PER_WORKER, stream_specs
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects

SUBJECTS = Subjects("ss")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
DECODE = WorkerLease("aaaa0000", "decode", "decode-0", "ready", 1, "0", 0)
STORE = WorkerLease("bbbb0000", "kvstore", "kvstore-0", "ready", 1, "0", 0, host="cccc0000")


def sound() -> dict[str, Stream]:
    """What NATS tells of a stack with nothing to do."""
    streams = {}
    for spec in stream_specs(SUBJECTS):
        config = StreamConfig(
            spec.name,
            spec.retention,
            spec.storage,
            spec.discard,
            spec.max_bytes,
            spec.max_messages or -1,
            spec.max_messages_per_subject or -1,
        )
        streams[spec.name] = Stream(config, StreamState(0, 0, NOW), NOW)
    return streams


def filled(streams: dict[str, Stream], name: str, **state: Any) -> dict[str, Stream]:
    stream = streams[name]
    return streams | {name: msgspec.structs.replace(stream, state=msgspec.structs.replace(stream.state, **state))}


def find(
    streams: dict[str, Stream] | None = None, indexes: dict[str, Any] | None = None, leases: tuple[WorkerLease, ...] = (DECODE, STORE)
) -> list[Finding]:
    look = BusLook(streams=sound() if streams is None else streams, indexes=indexes or {}, clocks_s={})
    return bus_findings(look, leases, SUBJECTS)


def test_a_sound_bus_is_one_good_line() -> None:
    [only] = find(indexes={"router": {"aaaa0000": {}, "cccc0000": {"dram": 3}}})
    assert only.state == "done" and "none near its limit" in only.text


@pytest.mark.parametrize(("share", "state"), [(0.79, "done"), (0.81, "warning"), (0.96, "failed")])
@pytest.mark.parametrize("what", ["bytes", "messages"])
def test_a_stream_near_its_limit(share: float, state: str, what: str) -> None:
    config = sound()["SS_REQUESTS"].config
    limit = config.max_bytes if what == "bytes" else config.max_msgs
    [only] = find(filled(sound(), "SS_REQUESTS", **{what: int(share * limit)}))
    assert only.state == state
    assert state == "done" or ("SS_REQUESTS" in only.text and only.remedy)


def test_a_stream_that_drops_its_oldest_may_be_full() -> None:
    assert [one.state for one in find(filled(sound(), "SS_USAGE", bytes=sound()["SS_USAGE"].config.max_bytes))] == ["done"]


def test_a_stream_that_is_gone_or_of_another_version() -> None:
    streams = sound()
    old = streams.pop("SS_DECODE")
    [gone] = find(streams)
    assert gone.state == "failed" and "SS_DECODE is not there" in gone.text
    old = msgspec.structs.replace(old, config=msgspec.structs.replace(old.config, storage="file"))
    [other] = find(streams | {"SS_DECODE": old})
    assert other.state == "failed" and "other rules" in other.text and "file" in other.text


def test_records_that_are_gone_are_missed_by_nobody() -> None:
    streams = sound()
    del streams["SS_DEAD"]
    [gone] = find(streams)
    assert gone.state == "warning" and "SS_DEAD is not there" in gone.text and gone.remedy


def test_a_model_that_gateways_cannot_serve() -> None:
    leases = [msgspec.structs.replace(DECODE, name=f"decode-{number}", model=model) for number, model in enumerate("aab")]
    [found] = card_findings({"b": "known"}, [*leases, STORE], SUBJECTS)
    assert found.state == "failed" and "model a of decode-0, decode-1 has no card in KV_ss_config" in found.text
    assert "nats stream rm KV_ss_config" in found.remedy
    assert card_findings({"a": "", "b": ""}, leases, SUBJECTS) == []
    assert card_findings({}, [msgspec.structs.replace(leases[0], state="starting")], SUBJECTS) == [], "it writes its card when it is ready"


def test_a_stream_that_this_nats_cannot_serve_says_why() -> None:
    """A newer server wrote it: it is in no list, and is not deleted either."""
    streams = {name: stream for name, stream in sound().items() if name != "SS_USAGE"}
    look = BusLook(streams=streams, offline={"SS_USAGE": "unsupported - required API level: 9"}, indexes={}, clocks_s={})
    [found] = bus_findings(look, (DECODE, STORE), SUBJECTS)
    assert found.state == "failed" and "SS_USAGE is offline: unsupported" in found.text and "newer NATS" in found.remedy


def test_dead_letters_stay_a_finding_when_the_router_was_restarted() -> None:
    dead = filled(sound(), "SS_DEAD", messages=3, last_ts=NOW - timedelta(minutes=4))
    finding = find(dead)[-1]
    assert finding.state == "warning" and finding.text.startswith("3 dead letters") and "4m ago" in finding.text


def test_a_worker_with_a_long_queue_and_one_that_is_gone() -> None:
    near = int(0.9 * MAX_TASKS_PER_WORKER)
    waiting = {"ss.v1.decode.aaaa0000": near, "ss.v1.decode.dddd0000": 2}
    stuck, gone = find(filled(sound(), "SS_DECODE", subjects=waiting))
    assert stuck.text == f"{near} of at most {MAX_TASKS_PER_WORKER} tasks wait for decode-0"
    assert gone.text.startswith("2 tasks in SS_DECODE wait for dddd0000, which is gone")
    assert [one.state for one in find(filled(sound(), "SS_DECODE", subjects={"ss.v1.decode.aaaa0000": 5}))] == ["done"]


def test_a_router_that_does_not_know_a_source() -> None:
    starting = msgspec.structs.replace(DECODE, instance="eeee0000", name="decode-1", state="starting")
    _, unknown = find(indexes={"router": {"aaaa0000": {}}}, leases=(DECODE, STORE, starting))
    assert unknown.state == "warning" and unknown.text == "router knows nothing yet of the blocks at kvstore-0"
    _, silent = find(indexes={"router": None})
    assert "router does not tell" in silent.text


def test_a_nats_that_does_not_tell() -> None:
    look = BusLook(streams=None, indexes={}, clocks_s={})
    [only] = bus_findings(look, [DECODE], SUBJECTS)
    assert only.state == "warning" and only.remedy


def test_skew_has_a_direction_and_a_threshold() -> None:
    ahead, behind = clock_findings({"decode-0": 1.9, "NATS": 61.2, "gateway": -1.9, "router": -3.0})
    assert "NATS is 61 s ahead of" in ahead.text and "router is 3 s behind" in behind.text
    assert {ahead.state, behind.state} == {"warning"}
