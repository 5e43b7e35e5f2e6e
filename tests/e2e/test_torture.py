"""Minutes of load while every service but the gateway is killed and stopped, at random: every answer is right, and nothing leaks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from tests.support.stack import SIM, checked_stack, metric, status_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

DURATION_S = float(os.environ.get("SLIPSTREAM_TORTURE_S", "600"))
SEED = int(os.environ.get("SLIPSTREAM_TORTURE_SEED", "1"))
FLAGS = ("--prefill", "2", "--decode", "2", "--sim-profile", "a=0,b=0.1,c=2,d=8")
VICTIMS = ["decode-0", "decode-1", "prefill-0", "prefill-1", "kvstore-0", "router", "nats", "planner"]
NUM_CLIENTS = 12
NUM_TOKENS = 48
QUIET_S = 60.0


def prompts() -> list[list[int]]:
    """Six long beginnings with six ends each: most of a prompt is in some cache, if that cache lives."""
    return [
        [7_000 + 300 * family + index for index in range(64 * (family + 1))] + [11_000 + 50 * member + index for index in range(40)]
        for family in range(6)
        for member in range(6)
    ]


def body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": "smollm2-135m",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Torture:
    """Clients that ask, some of whom leave in the middle, and a hand that kills."""

    def __init__(self, stack: LocalStack, random_: random.Random) -> None:
        self.stack = stack
        self.random = random_
        self.client = Client(stack.url, timeout_s=180)
        self.ends_s = 0.0
        self.wrong: list[str] = []
        self.num_answered = self.num_left = self.num_refused = 0
        self.slowest_s = 0.0
        self.strikes: list[str] = []

    async def run(self) -> None:
        self.expected = {tuple(prompt): (await self.ask(prompt)).text for prompt in prompts()}
        assert len(set(self.expected.values())) == len(self.expected) and all(self.expected.values())
        self.ends_s = time.monotonic() + DURATION_S
        await asyncio.gather(self.strike(), *(self.ask_on(random.Random(f"{SEED} {number}")) for number in range(NUM_CLIENTS)))
        await self.client.close()

    async def ask(self, prompt: list[int]) -> Outcome:
        """As OpenAI's clients do: a call that was not taken, because NATS was away for 5 s, is made again."""
        while (outcome := await self.client.generate("/v1/completions", body(prompt))).status == 503:
            self.num_refused += 1
            await asyncio.sleep(float(outcome.headers["retry-after"]))
        return outcome

    async def ask_on(self, random_: random.Random) -> None:
        choices = prompts()
        while time.monotonic() < self.ends_s:
            prompt = random_.choice(choices)
            asking = asyncio.ensure_future(self.ask(prompt))
            if random_.random() < 0.3:
                await asyncio.wait([asking], timeout=random_.uniform(0, 0.4))
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await asking
                self.num_left += 1
            else:
                self.check(prompt, await asking)

    def check(self, prompt: list[int], outcome: Outcome) -> None:
        self.num_answered += 1
        self.slowest_s = max(self.slowest_s, outcome.e2e_ms / 1000)
        if not outcome.is_ok:
            self.wrong.append(f"{outcome.status} {outcome.error}")
        elif outcome.text != self.expected[tuple(prompt)] or outcome.usage["completion_tokens"] != NUM_TOKENS:
            self.wrong.append(f"another text for a prompt of {len(prompt)} tokens")

    async def strike(self) -> None:
        while time.monotonic() < self.ends_s - 10:
            await asyncio.sleep(self.random.uniform(2, 8))
            victim, how = self.random.choice(VICTIMS), self.random.choice(["kill", "kill", "stop"])
            self.strikes.append(f"{how} {victim}")
            with contextlib.suppress(ProcessLookupError, KeyError):  # between two lives
                pid = self.stack.kill(victim, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                if how == "stop":
                    await asyncio.sleep(self.random.uniform(1, 6))
                    os.kill(pid, signal.SIGCONT)


def held(status: dict[str, Any]) -> dict[str, float]:
    """What must be nothing when nobody asks."""
    gauges = {
        "router": ["router_queued"],
        "prefill": ["prefill_tasks_held", "device_used_blocks"],
        "decode": ["decode_running", "decode_waiting", "device_used_blocks"],
        "kvstore": ["kv_leases", "kv_pins"],
    }
    found = {}
    for process in status["services"]:
        for name in gauges.get(process["role"], []):
            found[f"{process['name']} {name}"] = metric(process["metrics_address"], f"slipstream_{name}")
    return found


def gateway_use(stack: LocalStack) -> tuple[int, int]:
    """Files open, and KiB of memory, of the one process that lives all the time."""
    folder = Path("/proc") / str(stack.pid("gateway"))
    resident = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return len(list((folder / "fd").iterdir())), int(resident.split()[1])


def test_every_answer_is_right_and_nothing_leaks(tmp_path: Path, capsys: Any) -> None:
    with checked_stack(tmp_path / "state", *SIM, *FLAGS, "--kv-ssd", f"{tmp_path}/ssd:256M") as stack:
        torture, (files_before, kib_before) = Torture(stack, random.Random(SEED)), gateway_use(stack)
        asyncio.run(torture.run())
        deadline_s = time.monotonic() + QUIET_S
        while (any(held(status_of(stack, capsys)).values()) or len(stack.describe()["services"]) < 8) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        files, memory_kib = gateway_use(stack)
        with capsys.disabled():
            print(
                f"\n{DURATION_S:g} s, seed {SEED}, {len(torture.strikes)} strikes: {torture.num_answered} answered, the slowest after "
                f"{torture.slowest_s:.1f} s, {torture.num_left} left, {torture.num_refused} refused for now; the gateway went from "
                f"{files_before} to {files} open files and from {kib_before >> 10} to {memory_kib >> 10} MiB"
            )
        assert torture.wrong == [], torture.strikes
        assert torture.num_refused < torture.num_answered / 100
        assert torture.num_answered > DURATION_S and len(torture.strikes) > DURATION_S / 20
        assert {name: value for name, value in held(status_of(stack, capsys)).items() if value} == {}
        assert files <= files_before + 4
