"""What a decode worker says of a request: deltas, Progress, Finish."""

from __future__ import annotations

import asyncio
import zlib

import pytest

from services.decode.job import DELTA_LOGPROBS, DELTA_TOKENS, LAST_TOKENS, Job, State
from shared.engine.engine import Sampled
from shared.errors import EngineError
from shared.messages.codec import decode, encode
from shared.messages.request import DecodeTask
from shared.messages.session import TokenBatch
from shared.types import SamplingParams, TokenLogprob, pack_tokens, unpack_tokens
from tests.support.fake_delivery import FakeDelivery, make_request

WORKER = "1" * 8
PROMPT = list(range(100, 110))


def make(num_emitted: int = 0, num_logprobs: int = -1, **task: object) -> Job:
    """A job with `num_emitted` tokens of earlier epochs."""
    tokens = PROMPT + list(range(500, 500 + num_emitted))
    sampling = SamplingParams(max_tokens=10_000, num_logprobs=num_logprobs)
    request = make_request(7, tokens, num_emitted=num_emitted, sampling=sampling)
    return Job(DecodeTask(request, "0" * 8, WORKER, **task), FakeDelivery(), None, 10.0)  # type: ignore[arg-type]


def grow(job: Job, count: int) -> None:
    num_top = max(job.request.sampling.num_logprobs, 0)
    for _ in range(count):
        logprob = TokenLogprob(-0.5, [70_000] * num_top, [-1.5] * num_top)
        job.append(Sampled(500 + job.sequence.num_output_tokens, logprob))


def test_indexes_count_from_the_first_epoch() -> None:
    job = make(num_emitted=3)
    grow(job, 5)
    assert (job.delta(6).index, job.delta(6).token_ids) == (6, [506, 507])
    assert (job.delta(0).index, job.delta(0).token_ids) == (3, [503, 504, 505, 506, 507]), "earlier epochs are the gateway's"
    assert job.delta(99).token_ids == []
    assert job.num_new_tokens == 5


@pytest.mark.parametrize("num_logprobs", [-1, 0, 20])
def test_a_delta_fits_into_a_message(num_logprobs: int) -> None:
    job = make(num_logprobs=num_logprobs)
    grow(job, 5000)
    delta = job.delta(0)
    message = encode(TokenBatch(WORKER, [delta]))
    assert len(message) < 0.9 * 2**20
    assert decode(TokenBatch, message).deltas == [delta]
    assert len(delta.token_ids) == (DELTA_LOGPROBS // 21 if num_logprobs == 20 else DELTA_TOKENS)
    assert delta.logprobs is None if num_logprobs < 0 else len(delta.logprobs or ()) == len(delta.token_ids)
    assert job.delta(len(delta.token_ids)).token_ids[0] == 500 + len(delta.token_ids), "asked again, it goes on"


@pytest.mark.parametrize("num_new", [0, 1, 5, 100])
def test_the_finish_repeats_the_last_tokens(num_new: int) -> None:
    job = make(num_emitted=3, num_logprobs=0)
    grow(job, num_new)
    job.reason = "stop"
    finish = job.finish(WORKER, 12.5)
    last = unpack_tokens(finish.last_token_ids)
    output = list(range(500, 503 + num_new))
    assert (finish.reason, finish.num_output_tokens, finish.error_code) == ("stop", 3 + num_new, "")
    assert finish.crc32 == zlib.crc32(pack_tokens(output))
    assert last == output[len(output) - min(num_new, LAST_TOKENS) :]
    assert len(finish.last_logprobs or ()) == len(last)
    assert finish.usage.decode_ms == 2500


def test_an_error_has_no_reason() -> None:
    job = make()
    job.error = EngineError("x" * 1000)
    finish = job.finish(WORKER, 10.0)
    assert (finish.reason, finish.error_code, len(finish.error_message)) == (None, "engine_error", 512)


@pytest.mark.parametrize(
    ("task", "loaded", "cached", "computed"),
    [
        ({}, 0, 0, 10),
        ({}, 8, 8, 2),
        ({"prefill_worker": "2" * 8, "num_prefilled_tokens": 8, "num_cached_tokens": 4}, 8, 4, 6),
        ({"prefill_worker": "2" * 8, "num_prefilled_tokens": 8, "num_cached_tokens": 4}, 0, 0, 14),
    ],
)
def test_usage_tells_reused_from_computed(task: dict[str, object], loaded: int, cached: int, computed: int) -> None:
    """What prefill had cached and decode could not load was computed after all."""
    job = make(**task)
    job.num_loaded_tokens = loaded
    job.num_computed_prompt_tokens = 10 - loaded
    usage = job.finish(WORKER, 10.0).usage
    assert (usage.num_cached_tokens, usage.num_computed_tokens) == (cached, computed)


def test_progress_tells_waiting_from_decoding() -> None:
    job = make(num_emitted=3)
    stages = {}
    for state in State:
        job.state = state
        stages[state.name] = job.held().stage
    assert stages == {"WAITING": "waiting", "LOADING": "waiting", "READY": "waiting", "RUNNING": "decode", "ENDED": "decode"}
    assert job.held().num_output_tokens == 3


async def test_abandoning_breaks_off_what_is_under_way() -> None:
    job = make()
    job.abandon()
    assert job.is_cancelled
    job.beside = asyncio.create_task(asyncio.Event().wait())  # type: ignore[assignment]
    job.abandon()
    with pytest.raises(asyncio.CancelledError):
        await job.beside
