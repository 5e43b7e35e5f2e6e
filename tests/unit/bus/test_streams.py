from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.bus.jetstream import NS, _stream_config
from shared.bus.streams import (
    LEASE_TTL_S,
    LONGEST_DEADLINE_S,
    MAX_DELIVER,
    QUEUE_TTL_S,
    consumer_spec,
    dead_subject,
    spec_behind,
    spec_of_bucket,
    spec_of_stream,
    stream_specs,
    subject_matches,
)
from shared.errors import StreamMissing
from shared.messages.subjects import Subjects

SUBJECTS = Subjects()
SPECS = {spec.name: spec for spec in stream_specs(SUBJECTS)}


def test_every_stream_of_the_design() -> None:
    assert {name: spec.subject for name, spec in SPECS.items()} == {
        "SS_REQUESTS": "ss.v1.request.*.*",
        "SS_PREFILL": "ss.v1.prefill.*",
        "SS_DECODE": "ss.v1.decode.*",
        "SS_USAGE": "ss.v1.event.usage.*",
        "SS_DEAD": "ss.v1.dead.*",
        "KV_ss_workers": "$KV.ss_workers.>",
        "KV_ss_config": "$KV.ss_config.>",
    }


def test_work_queues_refuse_when_they_are_full() -> None:
    for name in ("SS_REQUESTS", "SS_PREFILL", "SS_DECODE"):
        spec = SPECS[name]
        assert (spec.retention, spec.discard, spec.storage) == ("workqueue", "new", "memory")
        assert spec.duplicate_window_s == spec.max_age_s
    for name in ("SS_PREFILL", "SS_DECODE"):
        assert SPECS[name].max_messages_per_subject
        assert SPECS[name].max_age_s == LONGEST_DEADLINE_S + 60
    assert SPECS["SS_REQUESTS"].max_age_s == QUEUE_TTL_S
    assert SPECS["SS_REQUESTS"].max_messages_per_subject is None


def test_records_drop_the_oldest() -> None:
    for name in ("SS_USAGE", "SS_DEAD"):
        assert (SPECS[name].retention, SPECS[name].discard, SPECS[name].storage) == ("limits", "old", "file")


def test_leases_run_out_and_settings_do_not() -> None:
    assert SPECS["KV_ss_workers"].max_age_s == LEASE_TTL_S == 3.0
    assert SPECS["KV_ss_config"].max_age_s is None


def test_durables() -> None:
    for stream in ("SS_PREFILL", "SS_DECODE"):
        spec = consumer_spec(stream)
        assert (spec.ack_wait_s, spec.max_deliver, spec.inactive_threshold_s) == (5.0, MAX_DELIVER, 60.0)
    requests = consumer_spec("SS_REQUESTS")
    assert (requests.ack_wait_s, requests.max_deliver, requests.inactive_threshold_s) == (5.0, -1, None)
    assert consumer_spec("SS_DECODE", max_deliver=7).max_deliver == 7
    for stream in ("SS_USAGE", "SS_", "DECODE", "KV_ss_workers"):
        with pytest.raises(StreamMissing):
            consumer_spec(stream)


def test_as_jetstream_is_told() -> None:
    config = _stream_config(SPECS["SS_DECODE"])
    assert config["discard_new_per_subject"] is True
    assert config["max_age"] == config["duplicate_window"] == 3660 * NS
    assert "discard_new_per_subject" not in _stream_config(SPECS["SS_REQUESTS"])
    bucket = _stream_config(SPECS["KV_ss_workers"])
    assert (bucket["max_msgs_per_subject"], bucket["max_age"], bucket["allow_direct"]) == (1, 3 * NS, True)
    assert "discard_new_per_subject" not in bucket


@pytest.mark.parametrize("namespace", ["ss", "blue2"])
def test_a_name_tells_the_rules(namespace: str) -> None:
    subjects = Subjects(namespace)
    for spec in stream_specs(subjects):
        assert spec_of_stream(spec.name) == spec
    assert spec_of_bucket(subjects.bucket("config")).name == f"KV_{namespace}_config"
    assert spec_behind(subjects.decode("ab")) == spec_of_stream(subjects.stream("decode"))
    assert spec_behind(subjects.request("high", "ab")).name == subjects.stream("requests")
    assert dead_subject(subjects.stream("decode")) == subjects.dead("decode")


@pytest.mark.parametrize("name", ["", "SS", "ss_decode", "SS_OTHER", "OTHER_DECODE_X", "KV_ss_other", "KV_", "_", "ORDERS"])
def test_names_that_are_not_ours(name: str) -> None:
    with pytest.raises(StreamMissing):
        spec_of_stream(name)


@pytest.mark.parametrize("subject", ["ss.v1.cancel", "ss.v1.decode", "ss.v1.decode.a.b", "ss.v2.decode.a", "nothing"])
def test_subjects_of_no_stream(subject: str) -> None:
    with pytest.raises(StreamMissing):
        spec_behind(subject)


def test_wildcards() -> None:
    for pattern, subject, matches in [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("*.b", "a.b", True),
        ("a.b.c", "a.b", False),
    ]:
        assert subject_matches(pattern, subject) is matches, (pattern, subject)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=5), st.data())
@settings(deadline=None)
def test_a_pattern_made_of_a_subject_matches_it(tokens: list[str], data: st.DataObject) -> None:
    pattern = [data.draw(st.sampled_from([token, "*"])) for token in tokens]
    assert subject_matches(".".join(pattern), ".".join(tokens))
    assert subject_matches(".".join([*pattern[:-1], ">"]), ".".join(tokens))
    assert not subject_matches(".".join([*pattern, "x"]), ".".join(tokens))
