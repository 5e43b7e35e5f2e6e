"""traceparent: what is taken, what is refused, what is made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.telemetry import propagation

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_flags_say_whether_it_is_sampled(flags: str, is_sampled: bool) -> None:
    context = propagation.parse(f"00-{TRACE}-{SPAN}-{flags}")
    assert context == propagation.TraceContext(TRACE, SPAN, is_sampled)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01\n",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert propagation.parse(text) is None


def test_a_later_version_may_have_more_fields() -> None:
    context = propagation.parse(f"cc-{TRACE}-{SPAN}-01-what-the-future-brings")
    assert context is not None
    assert context.trace_id == TRACE


@given(st.text(max_size=80))
def test_no_text_raises(text: str) -> None:
    context = propagation.parse(text)
    assert context is None or propagation.parse(context.traceparent) == context


def test_a_child_stays_in_the_trace_and_has_its_own_id() -> None:
    parent = propagation.new_trace()
    child = propagation.child_of(parent)
    assert (child.trace_id, child.is_sampled) == (parent.trace_id, True)
    assert child.span_id != parent.span_id
    assert propagation.parse(child.traceparent) == child


def test_ids_do_not_repeat() -> None:
    assert len({propagation.new_trace().trace_id for _ in range(1000)} | {propagation.new_span_id() for _ in range(1000)}) == 2000
