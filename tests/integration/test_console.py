"""The commands that look at a running stack, as a person types them."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from loadtest.client import Client, Outcome
from loadtest.local_stack import LocalStack
from services.console.__main__ import COMMANDS, main
from services.console.terminal import Terminal
from services.console.trace import draw, find_trace
from tests.support.stack import SIM, checked_stack

pytestmark = pytest.mark.timeout(120)

Told = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    with checked_stack(tmp_path_factory.mktemp("console"), *SIM, "--sim-profile", "a=0,b=0.01,c=0.0,d=2") as stack:
        asyncio.run(ask(stack, "A prompt of some length. " * 20))
        yield stack


async def ask(stack: LocalStack, prompt: str, model: str = "smollm2-135m") -> Outcome:
    client = Client(stack.url)
    outcome = await client.generate("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 5, "stream": True})
    await client.close()
    return outcome


def run(stack: LocalStack, capsys: Told, *words: str) -> tuple[int, str]:
    capsys.readouterr()
    code = main([*words, "--state-dir", str(stack.state_dir)])
    told = capsys.readouterr()
    return code, told.out + told.err


def as_json(stack: LocalStack, capsys: Told, *words: str) -> Any:
    code, told = run(stack, capsys, *words, "--json")
    assert code == 0, told
    return json.loads(told)


# -- trace ----------------------------------------------------------------------------------------------------------------
def test_a_trace_is_drawn_by_id_and_as_the_last(stack: LocalStack, capsys: Told) -> None:
    outcome = asyncio.run(ask(stack, "Another prompt of some length. " * 20))
    trace_id = outcome.headers["traceparent"].split("-")[1]
    for asked in (trace_id, trace_id[:8], "last"):
        code, told = run(stack, capsys, "trace", asked)
        assert code == 0 and trace_id in told
        for stage in ("text_completion smollm2-135m", "route", "generate"):
            assert stage in told
        assert "█" in told and re.search("routed to (prefill-0 → )?decode-0: ", told) and "score" in told
    spans = as_json(stack, capsys, "trace", trace_id)
    assert {span["trace_id"] for span in spans} == {trace_id}
    assert trace_id[:8] in run(stack, capsys, "trace", "--list")[1]


def test_a_trace_that_is_not_there(stack: LocalStack, capsys: Told) -> None:
    code, told = run(stack, capsys, "trace", "0123456789abcdef")
    assert code == 1 and "--list" in told and "Traceback" not in told


def test_bars_lie_where_the_stages_were(stack: LocalStack) -> None:
    asyncio.run(ask(stack, "One more. " * 30))
    spans = find_trace(stack.folder / "traces", "last")
    [head, _, _, call, *stages] = list(draw(spans, {}, Terminal(io.StringIO(), {})))
    assert head.startswith("trace ")
    assert call.rstrip().endswith("█" * 40), "the call is the whole"
    assert all("█" in line or "▏" in line for line in stages[: len(spans) - 1])


# -- top ------------------------------------------------------------------------------------------------------------------
def test_top_shows_what_happened_in_between(stack: LocalStack, capsys: Told) -> None:
    async def under_load() -> str:
        async def load() -> None:
            while not done.is_set():
                await ask(stack, "x" * 200)

        done = asyncio.Event()
        loading = asyncio.ensure_future(load())
        command = [
            sys.executable,
            "-m",
            "services.console",
            "top",
            "--once",
            "--json",
            "--interval",
            "2",
            "--state-dir",
            str(stack.state_dir),
        ]
        top = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        told, _ = await top.communicate()
        done.set()
        await loading
        return told.decode()

    told = json.loads(asyncio.run(under_load()))
    assert told["requests_per_s"] > 0 and told["output_tokens_per_s"] > 0
    assert 0 < told["ttft_ms"]["p50"] <= told["ttft_ms"]["p99"]
    assert 0 < told["hit_rate"] <= 1
    assert told["tiers"]["dram"]["bytes"] > 0
    assert {service["name"] for service in told["services"]} >= {"gateway", "router", "prefill-0", "decode-0", "kvstore-0", "planner"}
    assert told["silent"] == []
    code, shown = run(stack, capsys, "top", "--once", "--interval", "0.2")
    assert code == 0 and "decode-0" in shown and "\x1b" not in shown


# -- doctor ---------------------------------------------------------------------------------------------------------------
def test_a_sound_stack_has_nothing_broken(stack: LocalStack, capsys: Told) -> None:
    told = as_json(stack, capsys, "doctor")
    assert set(told) == {"environment", "stack", "cache"}
    assert [finding for part in told.values() for finding in part if finding["state"] == "failed"] == []
    assert "processes are ready" in told["stack"][0]["text"]
    assert "prompt tokens were there already" in told["cache"][0]["text"]


def test_the_cache_part_says_why_prompts_were_computed(stack: LocalStack, capsys: Told) -> None:
    for number in range(5):
        asyncio.run(ask(stack, f"{number} is what this begins with, so that nothing is found. " * 30))
        asyncio.run(ask(stack, "The same beginning for all of them, long enough for a block or two. " * 4 + f"But then {number}. " * 40))
    texts = [finding["text"] for finding in as_json(stack, capsys, "doctor", "cache")["cache"]]
    assert any("no earlier prompt began like them" in text for text in texts)
    assert any("and then differ" in text for text in texts)


def test_a_dead_router_is_broken(stack: LocalStack, capsys: Told) -> None:
    old = stack.kill("router")
    try:
        code, told = run(stack, capsys, "doctor", "stack")
        assert code == 1 and "slipstream logs router" in told
        assert "no router is ready" in told or "router has died" in told
    finally:
        stack.wait_restarted("router", old)


def test_a_process_that_stands_still_is_named(stack: LocalStack, capsys: Told) -> None:
    pid = stack.kill("kvstore-0", signal.SIGSTOP)
    try:
        told = ""
        while f"kvstore-0 runs (pid {pid}), but its lease has expired" not in told:  # its lease lives for 3 s
            code, told = run(stack, capsys, "doctor", "stack")
        assert code == 1 and "6 processes are ready" in told.splitlines()[1]
    finally:
        # Not SIGCONT: it would answer the scrapers of meanwhile, who have hung up.
        stack.kill("kvstore-0")
        stack.wait_restarted("kvstore-0", pid)
        while run(stack, capsys, "status")[0] != 0:  # it adopts its arena first
            pass


def test_streams_and_clocks_of_a_real_stack_are_sound(stack: LocalStack, capsys: Told) -> None:
    texts = [finding["text"] for finding in as_json(stack, capsys, "doctor", "stack")["stack"]]
    assert any("7 streams and buckets, none near its limit" in text for text in texts)
    assert not any("clock" in text for text in texts)


def test_status_says_which_run_it_is_about(stack: LocalStack, capsys: Told) -> None:
    code, told = run(stack, capsys, "status")
    assert code == 0 and told.splitlines()[0] == f"{stack.folder.name} · {stack.url} · ready"
    assert as_json(stack, capsys, "status", "--run", stack.folder.name)["run"] == stack.folder.name
    code, told = run(stack, capsys, "status", "--run", "nothing")
    assert code == 3 and f"--run {stack.folder.name}" in told


def test_without_a_stack_the_environment_is_looked_at(tmp_path: Any, capsys: Told) -> None:
    assert main(["doctor", "--state-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "nats-server" in told and "slipstream up" in told


# -- logs, config ---------------------------------------------------------------------------------------------------------
def test_logs_are_merged_by_time_and_cut(stack: LocalStack, capsys: Told) -> None:
    lines = [json.loads(line) for line in run(stack, capsys, "logs", "--json", "-n", "0")[1].splitlines()]
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert len({line["service"] for line in lines}) >= 5
    assert {line["service"] for line in map(json.loads, run(stack, capsys, "logs", "decode", "--json")[1].splitlines())} == {"decode-0"}
    assert len(run(stack, capsys, "logs", "-n", "2")[1].splitlines()) == 2
    code, told = run(stack, capsys, "logs", "nobody")
    assert code == 3 and "decode-0" in told


def test_settings_say_where_they_come_from(stack: LocalStack, capsys: Told) -> None:
    settings = {one["variable"]: one for one in as_json(stack, capsys, "config", "decode-0")}
    assert settings["SS_DEVICE"] == {"variable": "SS_DEVICE", "value": "sim", "default": "cpu", "origin": "--device"}
    assert settings["SS_MAX_NUM_SEQS"]["origin"] == "default"
    assert "password" not in (settings["SS_NATS_PASSWORD_FILE"]["value"] or "").split("/")[-1]
    code, told = run(stack, capsys, "config", "nobody")
    assert code == 2 and "decode" in told


@pytest.mark.parametrize("role", ["gateway", "router", "prefill", "decode", "kvstore", "planner"])
def test_every_role_shows_its_settings_without_a_stack(role: str, tmp_path: Any, capsys: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SS_LOG_LEVEL", "debug")
    assert main(["config", role, "--origin", "--state-dir", str(tmp_path)]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("SS_LOG_LEVEL")]
    assert line.split()[1:] == ["debug", "environment", "info"]


# -- completion -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command(shell: str, capsys: Told) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)
    assert "kv-dram" in script


def test_bash_completes(capsys: Told) -> None:
    main(["completion", "bash"])
    bash = shutil.which("bash")
    assert bash
    program = capsys.readouterr().out + (
        "\nCOMP_WORDS=(slipstream do); COMP_CWORD=1; _slipstream; echo ${COMPREPLY[@]}"
        "\nCOMP_WORDS=(slipstream up --kv-d); COMP_CWORD=2; _slipstream; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run([bash, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["down doctor", "--kv-dram"]
