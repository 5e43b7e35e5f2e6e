"""Faults under a running stream, on the simulated engine whose tokens are known: nothing is lost, nothing comes twice."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from tests.support.stack import SIM, checked_stack

pytestmark = pytest.mark.timeout(180)

NUM_TOKENS = 200
SLOW = ("--sim-profile", "a=0,b=0.0,c=0.0,d=10")
"""10 ms a decode step: a stream of 200 tokens is under way for 2 s."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("faults"), *SIM, *SLOW) as stack:
        yield stack


def body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def streams_with(stack: LocalStack, num_streams: int, fault: Callable[[], Awaitable[None]]) -> list[tuple[str, Outcome]]:
    """The text of each stream without a fault, and what came while `fault` struck in its midst."""
    client = Client(stack.url)
    model = (await client.get("/v1/models"))["data"][0]["id"]
    prompts = [[5_000 + 100 * number + index for index in range(40)] for number in range(num_streams)]

    async def all_at_once() -> list[Outcome]:
        return await asyncio.gather(*(client.generate("/v1/completions", body(model, prompt)) for prompt in prompts))

    undisturbed = await all_at_once()
    disturbed = asyncio.ensure_future(all_at_once())
    await asyncio.sleep(0.5)
    await fault()
    outcomes = await disturbed
    await client.close()
    return [(before.text, after) for before, after in zip(undisturbed, outcomes, strict=True)]


def check(results: list[tuple[str, Outcome]]) -> None:
    for expected, outcome in results:
        assert outcome.is_ok, outcome.error
        assert outcome.text == expected
        assert outcome.usage["completion_tokens"] == NUM_TOKENS
        assert outcome.finish_reason == "length"


@pytest.mark.parametrize("victim", ["decode-0", "router", "prefill-0", "kvstore-0", "planner", "nats"])
def test_a_killed_service_costs_a_pause_and_no_token(stack: LocalStack, victim: str) -> None:
    async def kill() -> None:
        old = stack.kill(victim)
        await asyncio.to_thread(stack.wait_restarted, victim, old)

    check(asyncio.run(streams_with(stack, 4, kill)))


def test_a_stopped_decode_worker_that_wakes_up_writes_nothing_twice(tmp_path: Path) -> None:
    with checked_stack(tmp_path, *SIM, *SLOW, "--decode", "2") as stack:

        async def stop_for_a_while() -> None:
            stack.kill("decode-0", signal.SIGSTOP)
            await asyncio.sleep(5)
            with contextlib.suppress(ProcessLookupError):
                stack.kill("decode-0", signal.SIGCONT)

        check(asyncio.run(streams_with(stack, 6, stop_for_a_while)))


def test_no_service_imports_torch(tmp_path: Path) -> None:
    with checked_stack(tmp_path, *SIM, "--prefill", "4", "--decode", "4") as stack:
        for name, pid in stack.describe()["services"].items():
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(), name
