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
from tests.support.process import ServiceProcess
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
    """T06 and T07 among them: the store, and the router."""

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


@pytest.mark.parametrize("killed", ["first", "second"])
def test_of_two_routers_one_is_killed_under_load_and_nothing_is_lost(stack: LocalStack, killed: str) -> None:
    """T07: requests come all the time, so that some are taken, queued or under way wherever the death strikes. Each ends once, and well."""

    async def run() -> tuple[list[Outcome], int]:
        run = stack.describe()
        second = await ServiceProcess.start(
            "services.router",
            {
                "SS_NATS_URL": run["nats_url"],
                "SS_NATS_USER": "router",
                "SS_NATS_PASSWORD_FILE": f"{run['folder']}/nats/router",
                "SS_NAME": "router-second",
            },
        )
        await second.until_state("ready")
        client, outcomes, done = Client(stack.url), [], asyncio.Event()

        async def ask(number: int) -> None:
            while not done.is_set():
                prompt = [6_000 + (len(outcomes) * 7 + number) % 3_000 + index for index in range(40)]
                outcomes.append(await client.generate("/v1/completions", {**body("smollm2-135m", prompt), "max_tokens": 12}))

        asking = [asyncio.ensure_future(ask(number)) for number in range(12)]
        await asyncio.sleep(1.0)
        num_before = len(outcomes)
        if killed == "second":
            second.send(signal.SIGKILL)
            await second.ended()
        else:
            old = stack.kill("router")
            await asyncio.to_thread(stack.wait_restarted, "router", old)
        await asyncio.sleep(1.0)
        done.set()
        await asyncio.gather(*asking)
        await client.close()
        if killed == "first":
            second.send(signal.SIGTERM)
            assert await second.ended() == 0
        await second.close()
        return outcomes, num_before

    outcomes, num_before = asyncio.run(run())
    assert 0 < num_before < len(outcomes)
    assert [(outcome.status, outcome.error) for outcome in outcomes if not outcome.is_ok] == []
    assert {outcome.usage["completion_tokens"] for outcome in outcomes} == {12}
    assert {outcome.finish_reason for outcome in outcomes} == {"length"}
