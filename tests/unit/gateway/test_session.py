"""The session's rules, one by one."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest

from services.gateway.session import LOST_S, MAX_MIGRATIONS, AskResend, Count, Session, Submit, Tell
from shared.messages.request import GenerateRequest
from shared.messages.session import Finish, HeldRequest, TokenDelta
from shared.types import SamplingParams, Usage, pack_tokens

ID = "cd" * 16
A, B = "a" * 8, "b" * 8


def request(**fields: Any) -> GenerateRequest:
    base = GenerateRequest(
        ID, 0, "0" * 8, "0" * 16, "normal", pack_tokens([1, 2]), 0, SamplingParams(max_tokens=4), bytes(32), "0" * 16, b"", 10_000, 0
    )
    return msgspec.structs.replace(base, **fields)


def delta(index: int, *tokens: int, epoch: int = 0) -> TokenDelta:
    return TokenDelta(ID, epoch, index, list(tokens))


def finish(tokens: list[int], instance: str = A, epoch: int = 0, **fields: Any) -> Finish:
    done = Finish(ID, epoch, instance, "stop", len(tokens), zlib.crc32(pack_tokens(tokens)))
    return msgspec.structs.replace(done, **fields)


@pytest.fixture
def session() -> Session:
    return Session(request(), 0.0)


def submitted(actions: list[Any]) -> GenerateRequest | None:
    return next((action.request for action in actions if isinstance(action, Submit)), None)


def test_the_first_instance_to_speak_is_the_only_one(session: Session) -> None:
    assert session.on_tokens(A, delta(0, 7), 0.1) == []
    actions = session.on_tokens(B, delta(0, 8), 0.1)
    assert session.output == [7]
    [cancel] = [action.cancel for action in actions if isinstance(action, Tell)]
    assert (cancel.worker, cancel.epoch) == (B, 0)


def test_a_finish_of_another_instance_ends_nothing(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.1)
    reply, _ = session.on_finish(finish([8], instance=B), 0.2)
    assert reply.done
    assert session.end is None


def test_a_gap_is_asked_for_once_in_a_while(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.0)
    assert AskResend(A, 1) in session.on_tokens(A, delta(2, 9), 0.1)
    assert not any(isinstance(action, AskResend) for action in session.on_tokens(A, delta(3, 10), 0.2))
    session.on_tokens(A, delta(1, 8, 9, 10), 0.3)
    assert session.output == [7, 8, 9, 10]


def test_progress_tells_of_a_lost_last_batch(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.0)
    assert session.on_progress(A, "decode", HeldRequest(ID, 0, "decode", 3), 1.0) == [AskResend(A, 1)]


def test_a_finish_brings_the_last_tokens_itself(session: Session) -> None:
    session.on_tokens(A, delta(0, 7, 8), 0.0)
    reply, _ = session.on_finish(finish([7, 8, 9], last_token_ids=pack_tokens([8, 9])), 0.1)
    assert reply.done
    assert session.output == [7, 8, 9]
    assert session.end is not None
    assert session.end.reason == "stop"


def test_a_finish_with_a_gap_before_it_is_answered_with_where_to_resend(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.0)
    reply, _ = session.on_finish(finish([7, 8, 9, 10], last_token_ids=pack_tokens([10])), 0.1)
    assert (reply.done, reply.resend_from) == (False, 1)
    assert session.end is None


def test_tokens_that_disagree_with_their_checksum_are_an_error(session: Session) -> None:
    session.on_tokens(A, delta(0, 7, 8), 0.0)
    reply, actions = session.on_finish(finish([7, 9]), 0.1)
    assert reply.done
    assert Count("crc_mismatch") in actions
    assert session.end is not None
    assert session.end.error is not None


def test_silence_moves_the_request_with_what_it_has(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.0)
    assert session.tick(LOST_S - 0.1, has_router=True) == []
    actions = session.tick(LOST_S + 0.1, has_router=True)
    again = submitted(actions)
    assert again is not None
    assert (again.epoch, again.num_emitted, again.sampling.max_tokens) == (1, 1, 3)
    assert again.token_ids == pack_tokens([1, 2, 7])
    kinds = [type(action) for action in actions if not isinstance(action, Count)]
    assert kinds == [Tell, Submit], "the old epoch is cancelled before the new one is submitted"
    assert session.on_tokens(A, delta(1, 8), 3.0) == [Count("stale_epoch")]


def test_a_router_that_holds_it_keeps_it_alive_for_ever(session: Session) -> None:
    for tenth in range(1, 90):
        session.on_progress("c" * 8, "router", HeldRequest(ID, 0, "queued"), tenth / 10)
        assert session.tick(tenth / 10, has_router=True) == []


def test_without_a_router_it_waits(session: Session) -> None:
    assert session.tick(5.0, has_router=False) == []
    assert session.epoch == 0


def test_the_loss_of_a_router_is_not_counted(session: Session) -> None:
    for epoch in range(6):
        session.on_progress("c" * 8, "router", HeldRequest(ID, epoch, "queued"), 0.1)
        assert submitted(session.on_lost("c" * 8, 0.1, has_router=True)) is not None
    assert session.num_migrations == 0


def test_workers_may_be_lost_three_times(session: Session) -> None:
    for epoch in range(MAX_MIGRATIONS + 1):
        session.on_tokens(f"{epoch:08x}", delta(0, epoch=epoch), 0.0)
        session.on_progress(f"{epoch:08x}", "decode", HeldRequest(ID, epoch, "decode"), 0.0)
        session.on_lost(f"{epoch:08x}", 0.1, has_router=True)
    assert session.end is not None
    assert session.end.error is not None
    assert session.end.error.code == "worker_lost"


def test_only_the_holder_s_lease_matters(session: Session) -> None:
    session.on_tokens(A, delta(0, 7), 0.0)
    assert session.on_lost(B, 0.1, has_router=True) == []


def test_everything_there_but_the_finish_is_complete(session: Session) -> None:
    session.on_tokens(A, delta(0, 7, 8, 9, 10), 0.0)
    session.on_lost(A, 0.1, has_router=True)
    assert session.end is not None
    assert session.end.reason == "length"


def test_the_deadline_ends_it(session: Session) -> None:
    actions = session.tick(10.1, has_router=True)
    assert [type(action) for action in actions] == [Tell]
    assert session.end is not None
    assert session.end.error is not None
    assert session.end.error.code == "deadline_exceeded"


def test_a_cancelled_request_is_wanted_by_nobody(session: Session) -> None:
    assert session.wants(0)
    session.cancel()
    assert not session.wants(0)
    assert session.cancel() == []
    assert session.on_finish(finish([1]), 1.0)[0].done


def test_an_error_from_a_router_keeps_its_status(session: Session) -> None:
    refused = msgspec.structs.replace(finish([]), reason=None, error_code="no_workers", error_message="none", retry_after_s=2.0)
    session.on_finish(refused, 0.1)
    assert session.end is not None
    error = session.end.error
    assert error is not None
    assert (error.status, error.code) == (503, "no_workers")


def test_cached_tokens_are_those_of_the_worker_that_began(session: Session) -> None:
    """To the next one, what this request itself computed before is cached too."""
    session.on_tokens(A, msgspec.structs.replace(delta(0, 5), num_cached_tokens=0), 1.0)
    [*_, submit] = session.on_lost(A, 1.5, has_router=True)
    assert isinstance(submit, Submit) and submit.request.epoch == 1
    session.on_tokens(B, msgspec.structs.replace(delta(1, 6, epoch=1), num_cached_tokens=2), 2.0)
    session.on_finish(finish([5, 6], B, 1, usage=Usage(2, 2, num_cached_tokens=2)), 2.0)
    assert session.end is not None
    assert (session.num_cached_tokens, session.end.usage.num_cached_tokens) == (0, 0)


def test_cached_tokens_of_a_finish_without_a_batch(session: Session) -> None:
    session.on_finish(finish([5], last_token_ids=pack_tokens([5]), usage=Usage(2, 1, num_cached_tokens=1)), 2.0)
    assert session.num_cached_tokens == 1
