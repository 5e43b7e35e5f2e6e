"""The whole stack says what transformers says, token for token, in float32: alone, eight at once, warm, and without its helpers."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.arrivals import closed_loop
from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from tests.support.stack import checked_stack

pytestmark = pytest.mark.timeout(300)

Case = tuple[str, dict[str, Any], str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(
        tmp_path_factory.mktemp("exact"), "--numerics", "exact", "--kv-dram", "512M", environ={"SS_DISAGGREGATION": "always"}
    ) as stack:
        yield stack


def ask_all(stack: LocalStack, cases: list[Case], concurrency: int) -> list[Outcome]:
    async def ask() -> list[Outcome]:
        client = Client(stack.url)
        outcomes = await closed_loop(len(cases), concurrency, lambda index: client.generate(cases[index][0], cases[index][1]))
        await client.close()
        return outcomes

    return asyncio.run(ask())


def wait_until_served(stack: LocalStack, case: Case) -> None:
    """A model without any decode worker is refused at once (503); its clients try again."""
    while not (outcome := ask_all(stack, [case], 1)[0]).is_ok:
        assert outcome.status == 503, outcome.error


def check(cases: list[Case], outcomes: list[Outcome]) -> None:
    for (path, body, expected), outcome in zip(cases, outcomes, strict=True):
        asked = body.get("messages") or body["prompt"]
        assert outcome.is_ok, outcome.error
        assert outcome.text == expected, f"{path} {str(asked)[:80]}"


def test_at_least_24_prompts(cases: list[Case]) -> None:
    assert len(cases) >= 24
    assert len({expected for *_, expected in cases}) > 12


@pytest.mark.parametrize("concurrency", [1, 8], ids=["alone", "eight at once"])
def test_the_same_text_as_transformers(stack: LocalStack, cases: list[Case], concurrency: int) -> None:
    check(cases, ask_all(stack, cases, concurrency))


def test_the_same_text_from_a_warm_cache(stack: LocalStack, cases: list[Case]) -> None:
    long_ones = [case for case in cases if len(case[1].get("prompt", "")) > 500]
    ask_all(stack, long_ones, 1)
    outcomes = ask_all(stack, long_ones, 1)
    check(long_ones, outcomes)
    for outcome in outcomes:
        assert outcome.usage["prompt_tokens_details"]["cached_tokens"] >= 496


@pytest.mark.parametrize("absent", ["kvstore-0", "prefill-0"])
def test_the_same_text_without_a_helper(stack: LocalStack, cases: list[Case], absent: str) -> None:
    """Stopped, not killed: the supervisor does not replace it, and nobody answers in its place."""
    stack.kill(absent, signal.SIGSTOP)
    try:
        check(cases[-8:], ask_all(stack, cases[-8:], 2))
    finally:
        stack.kill(absent, signal.SIGCONT)


def test_the_same_text_across_a_restart_of_decode(stack: LocalStack, cases: list[Case]) -> None:
    old = stack.kill("decode-0")
    stack.wait_restarted("decode-0", old)
    wait_until_served(stack, cases[0])
    check(cases[-8:], ask_all(stack, cases[-8:], 4))
