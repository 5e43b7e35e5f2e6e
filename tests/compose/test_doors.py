"""Both doors of the stack in containers, its shared arena, and the commands that the README shows."""

from __future__ import annotations

import asyncio
import json
import re
import shlex

import pytest

from loadtest.client import Client
from tests.support.compose import MODEL, QUESTION, ROOT, Compose, ask

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]


async def test_both_doors_answer(compose: Compose) -> None:
    client = Client(compose.url)
    outcome = await client.generate("/v1/chat/completions", QUESTION)
    await client.close()
    assert "Paris" in outcome.text, outcome.error
    assert "Paris" in compose.console("nats", "req", "ss.v1.generate", json.dumps(QUESTION))
    url = compose.console("nats", "url")
    assert url.startswith("nats://client:") and url.strip().endswith(f"@127.0.0.1:{compose.nats_port}")


async def test_all_containers_of_the_host_share_one_arena(compose: Compose) -> None:
    """Asked often enough, both decode workers answer; whichever it is finds the prompt's blocks, computed or not."""
    client = Client(compose.url)
    body = {"model": MODEL, "prompt": "The tide comes in, the tide goes out. " * 20, "max_tokens": 4, "temperature": 0}
    outcomes = [await client.generate("/v1/completions", body) for _ in range(8)]
    burst = await asyncio.gather(*(client.generate("/v1/completions", body) for _ in range(8)))
    await client.close()
    assert all(outcome.is_ok for outcome in [*outcomes, *burst])
    assert len({outcome.headers["x-slipstream-decode"] for outcome in burst}) == 2
    assert all(outcome.usage["prompt_tokens_details"]["cached_tokens"] >= 128 for outcome in burst)


async def test_the_console_sees_the_stack_from_its_own_container(compose: Compose) -> None:
    """Leases say addresses that lead to the next container, and traces lie in a volume of theirs."""
    outcome = await ask(compose, 8, "lighthouses")
    traced = compose.console("trace", "last")
    assert outcome.headers["traceparent"].split("-")[1] in traced
    assert all(stage in traced for stage in ("text_completion", "route", "generate", "routed to decode-"))
    status = compose.console("status")
    assert status.startswith("nats://nats:4222") and status.count(MODEL) == 3
    top = json.loads(compose.console("top", "--once", "--json"))
    assert top["silent"] == [] and all(service["memory_bytes"] > 2**20 for service in top["services"])
    found = json.loads(compose.run("run", "--rm", "console", "doctor", "--json", check=False).stdout)
    assert [one for part in found.values() for one in part if one["state"] == "failed"] == []
    assert any("prompt tokens were there already" in one["text"] for one in found["cache"])
    assert "docker compose logs router" in compose.console("logs", "router", check=False)


def test_the_commands_of_the_readme(compose: Compose) -> None:
    [block] = re.findall(r"<!-- run: compose -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    shown = ""
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[:2] == ["docker", "compose"]
        shown += compose.run(*words[2:]).stdout
    assert "Paris" in shown and "nats://client:" in shown and len(compose.containers("decode")) == 4
