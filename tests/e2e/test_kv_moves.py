"""The KV really moves: decode loads what prefill committed, on one host and between two; a second turn computes only what is new."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from tests.e2e.conftest import MODEL
from tests.support.stack import checked_stack, metric, status_of

pytestmark = pytest.mark.timeout(180)

BLOCK_TOKENS = 16
ALWAYS = {"SS_DISAGGREGATION": "always"}


@pytest.fixture(scope="module", params=["1", "2"], ids=["one host", "two hosts"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("kv"), "--kv-dram", "256M", "--hosts", request.param, environ=ALWAYS) as stack:
        yield stack


def ask(stack: LocalStack, path: str, **body: Any) -> Outcome:
    async def once() -> Outcome:
        client = Client(stack.url)
        outcome = await client.generate(path, {"model": MODEL, "temperature": 0, **body})
        await client.close()
        return outcome

    outcome = asyncio.run(once())
    assert outcome.is_ok, outcome.error
    return outcome


def loaded(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> tuple[float, float]:
    """Blocks and bytes that decode has loaded from its store."""
    lease = next(service for service in status_of(stack, capsys)["services"] if service["role"] == "decode")
    address = lease["metrics_address"]
    return metric(address, "slipstream_kvclient_loaded_blocks_total"), metric(address, "slipstream_kvclient_loaded_bytes_total")


def test_decode_loads_the_blocks_that_prefill_committed(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    before = loaded(stack, capsys)
    ask(stack, "/v1/completions", prompt=[7_000 + index for index in range(200)], max_tokens=4)
    after = loaded(stack, capsys)
    num_blocks = (200 - 1) // BLOCK_TOKENS
    assert after[0] - before[0] == num_blocks
    assert (after[1] - before[1]) % num_blocks == 0
    assert after[1] > before[1]


def test_a_second_turn_computes_only_what_is_new(stack: LocalStack) -> None:
    story = "Tell me about the sea. " * 20
    first = ask(stack, "/v1/chat/completions", messages=[{"role": "user", "content": story}], max_tokens=24)
    turns = [{"role": "user", "content": story}, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And the sky?"}]
    second = ask(stack, "/v1/chat/completions", messages=turns, max_tokens=8)
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    assert first.usage["prompt_tokens"] - BLOCK_TOKENS <= cached < second.usage["prompt_tokens"]
