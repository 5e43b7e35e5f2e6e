"""The main process of each container killed with a request in flight, and more workers under load."""

from __future__ import annotations

import asyncio
import time

import pytest

from loadtest.client import Outcome
from tests.support.compose import Compose, ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]
DROP_S = 4.0
"""A gateway's work is dropped within so long: its lease runs out after 3 s."""
LOOK_S = 2.0
"""What looking into containers may take on top."""


@pytest.mark.parametrize("service", ["decode", "prefill", "router", "kvstore", "planner", "nats"])
async def test_a_killed_container_comes_back_and_the_request_in_flight_finishes(compose: Compose, service: str) -> None:
    expected = await ask(compose, 60)
    asking = asyncio.ensure_future(ask(compose, 60))
    decoding = await compose.until_running()
    container = decoding if service == "decode" else compose.containers(service)[0]
    num_restarts = compose.kill_main_process(container)
    assert not asking.done()
    outcome = await asking
    assert (outcome.error, outcome.text, outcome.usage["completion_tokens"]) == ("", expected.text, 60)
    await compose.until_healthy(container, num_restarts + 1)


async def test_with_the_gateway_gone_its_clients_see_it_and_workers_drop_the_work(compose: Compose) -> None:
    """1,500 tokens take more than half a minute; they are not computed to the end for nobody."""
    asking = asyncio.ensure_future(ask(compose, 1500, "mountains"))
    decoding = await compose.until_running()
    [gateway] = compose.containers("gateway")
    num_restarts = compose.kill_main_process(gateway)
    killed_s = time.monotonic()
    assert (await asking).error
    while await asyncio.to_thread(compose.counted, decoding, "slipstream_decode_running"):
        pass
    took_s = time.monotonic() - killed_s
    print(f"dropped {took_s:.1f} s after the gateway's death")
    assert took_s < DROP_S + LOOK_S
    assert compose.counted(decoding, 'slipstream_decode_ended_total{outcome="gateway_gone"}') == 1
    await compose.until_healthy(gateway, num_restarts + 1)
    assert (await ask(compose, 8)).is_ok


async def test_scaling_up_under_load_fails_no_request(compose: Compose) -> None:
    stop = asyncio.Event()
    outcomes: list[Outcome] = []

    async def load(number: int) -> None:
        while not stop.is_set():
            outcomes.append(await ask(compose, 16, f"subject {number} {len(outcomes)}"))

    loading = [asyncio.ensure_future(load(number)) for number in range(3)]
    try:
        await asyncio.to_thread(compose.run, "up", "-d", "--wait", "--no-recreate", "--scale", "decode=4")
        while (
            sum(
                service["role"] == "decode" and service["state"] == "ready"
                for service in (await asyncio.to_thread(compose.status))["services"]
            )
            < 4
        ):
            pass
    finally:
        stop.set()
        await asyncio.gather(*loading)
    assert len(outcomes) > 4
    assert [outcome.error for outcome in outcomes if not outcome.is_ok] == []
