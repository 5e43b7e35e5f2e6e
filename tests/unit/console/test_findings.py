import os
import re
from pathlib import Path

import pytest

from services.console import cache_findings as cache
from services.console import figures, findings
from services.console.cache_findings import cache_findings
from services.console.findings import Finding, stack_findings
from services.console.pages import Pages
from services.console.run_folder import Run, process_start
from shared.messages.fleet import WorkerLease
from shared.telemetry.metrics import INSTRUMENTS
from shared.telemetry.scrape import Page, parse_page

PID = os.getpid()
ROLES = ("gateway", "router", "prefill", "decode", "kvstore", "planner")


def pages(text: str = "", role: str = "router", silent: tuple[str, ...] = ()) -> Pages:
    return Pages({role: (role, parse_page(text))}, list(silent))  # type: ignore[dict-item]


def leases(*roles: str, version: str = "1") -> list[WorkerLease]:
    return [WorkerLease(f"{n:08x}", role, role, "ready", 1, version, 0) for n, role in enumerate(roles)]  # type: ignore[arg-type]


def stack(**services: int) -> Run:
    return Run(
        folder=Path("/x/run-1"), pid=PID, pid_start=process_start(PID) or 0, version="1", namespace="ss", nats_url="", services=services
    )


def texts(found: list[Finding], state: str) -> list[str]:
    return [one.text for one in found if one.state == state]


# -- the names ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", [findings, cache, figures])
def test_every_metric_that_is_looked_at_is_made_by_a_service(module: object) -> None:
    made = {one.exposed_name + ("_total" if one.kind == "counter" else "") for one in INSTRUMENTS.values()}
    source = Path(str(module.__file__)).read_text()  # type: ignore[attr-defined]
    asked = set(re.findall(r'"((?:slipstream_|vllm:)\w+)"', source))
    assert asked and asked <= made, asked - made


def test_every_sign_names_labels_that_its_metric_has() -> None:
    of_name = {one.exposed_name + "_total": one for one in INSTRUMENTS.values()}
    for name, labels, text, remedy in findings._SIGNS:
        assert set(labels) <= set(of_name[name].labels), name
        assert text.format(3.0) and remedy


# -- the stack ---------------------------------------------------------------------------------------------------------------
def test_a_sound_stack_is_one_good_line() -> None:
    [only] = stack_findings(stack(router=PID), leases(*ROLES), pages("slipstream_engine_errors_total 0\n"))
    assert (only.state, only.text) == ("done", "run-1: 6 of 6 processes are ready")


def test_a_missing_role_is_broken_or_only_slower() -> None:
    found = stack_findings(stack(), leases("gateway", "router", "planner"), pages())
    assert texts(found, "failed") == ["no decode is ready: nothing is generated"]
    assert len(texts(found, "warning")) == 2


def test_a_silent_process_and_two_versions() -> None:
    fleet = [*leases(*ROLES), *leases("decode", version="2")]
    found = stack_findings(stack(), fleet, pages(silent=("decode",)))
    assert texts(found, "failed") == ["decode does not answer on /metrics"]
    assert texts(found, "warning")[-1] == "processes of several versions run: 1, 2"


def test_a_process_without_a_lease_is_counted() -> None:
    found = stack_findings(stack(nats=PID, router=PID, decode=PID), leases(*[role for role in ROLES if role != "router"]), pages())
    assert found[0].state == "warning" and found[0].text.endswith("5 of 6 processes are ready, not router")


def test_what_happened_once_is_told_so() -> None:
    found = stack_findings(stack(), leases(*ROLES), pages("slipstream_leases_lost_total 1\n"))
    assert found[1].text.startswith("processes lost their own lease once:")


@pytest.mark.parametrize("sign", findings._SIGNS, ids=lambda sign: sign[0])
def test_a_counter_that_should_be_zero(sign: tuple[str, dict[str, str], str, str]) -> None:
    name, labels, text, remedy = sign
    shown = ",".join(f'{label}="{value}"' for label, value in labels.items())
    found = stack_findings(stack(), leases(*ROLES), pages(f"{name}{{{shown}}} 2\n"))
    assert found[1:] == [Finding("warning", text.format(2.0), remedy)]


def test_sources_that_the_router_could_not_read() -> None:
    text = 'slipstream_router_snapshots_total{outcome="exact"} 4\nslipstream_router_snapshots_total{outcome="gap"} 1\n'
    assert len(stack_findings(stack(), leases(*ROLES), pages(text))) == 1
    [_, degraded] = stack_findings(stack(), leases(*ROLES), pages(text + 'slipstream_router_snapshots_total{outcome="timeout"} 2\n'))
    assert degraded.text.startswith("2 looks") and "DEGRADED" in degraded.text


# -- the cache ---------------------------------------------------------------------------------------------------------------
def routed(asked: int, had: int, similar: tuple[int, int] = (0, 1), **missed: int) -> str:
    lines = [f"slipstream_router_prompt_tokens_total {asked}", f"slipstream_router_overlap_tokens_total {had}"]
    lines += [f'slipstream_router_miss_tokens_total{{reason="{reason}"}} {tokens}' for reason, tokens in missed.items()]
    lines += [f'slipstream_router_similar_total{{outcome="{one}"}} {n}' for one, n in zip(("found", "none"), similar, strict=True)]
    return "\n".join(lines) + "\n"


def test_reasons_are_summed_up_most_first_and_add_up() -> None:
    found = cache_findings(pages(routed(1000, 500, cold=100, diverged=300, shorter_than_block=1)))
    assert [one.text.split(" ")[0] for one in found] == ["50%", "30%", "10%", "<1%", "10%"]
    assert [one.state for one in found] == ["done", "warning", "warning", "done", "done"]
    assert "behind what stays" in found[1].remedy and "--warm" in found[2].remedy
    assert "no whole block" in found[-1].text


def test_a_small_share_is_told_without_advice() -> None:
    [_, small, _] = cache_findings(pages(routed(1000, 900, diverged=50)))
    assert (small.state, small.remedy) == ("done", "")


@pytest.mark.parametrize(("similar", "cold", "advised"), [((3, 7), 400, True), ((1, 9), 400, False), ((3, 7), 10, False)])
def test_similar_prompts_that_differ_at_once_are_pointed_out(similar: tuple[int, int], cold: int, advised: bool) -> None:
    found = cache_findings(pages(routed(1000, 1000 - cold, similar, cold=cold)))
    assert any("resemble" in one.text and "first tokens" in one.remedy for one in found) is advised


@pytest.mark.parametrize(
    ("place", "kind", "tokens", "said"),
    [
        ("beginning", "time", 730, "73% of the prompt tokens stand behind a date or a time among the first words"),
        ("later", "id", 120, "12% of the prompt tokens stand behind an id, which is where"),
        ("later", "order", 300, "30% of the prompt tokens stand behind JSON with its keys, or its tools, in another order, which is where"),
        ("later", "whitespace", 200, "20% of the prompt tokens stand behind a blank or a line break"),
        ("later", "id", 90, ""),
        ("later", "text", 900, ""),
    ],
)
def test_what_prompts_stumble_over_is_named(place: str, kind: str, tokens: int, said: str) -> None:
    gateway = f'vllm:prompt_tokens_total 1000\nslipstream_prompt_fork_tokens_total{{place="{place}",kind="{kind}"}} {tokens}\n'
    both = Pages({"router": ("router", parse_page(routed(1000, 1000))), "gateway": ("gateway", parse_page(gateway))}, [])
    found = [finding for finding in cache_findings(both) if "stand behind" in finding.text]
    assert [finding.text[: len(said)] for finding in found] == ([said] if said else [])
    remedy = {"order": "the same order", "whitespace": "to the blank"}.get(kind, "Move")
    assert all(finding.state == "warning" and remedy in finding.remedy for finding in found)


def test_nothing_was_asked_yet() -> None:
    [only] = cache_findings(pages())
    assert (only.state, only.text) == ("done", "no request was routed yet")


def test_what_was_lost_between_prefill_and_decode() -> None:
    worker = 'slipstream_decode_handoff_misses_total{reason="expired"} 7\nslipstream_kvclient_faults_total{operation="load",reason="x"} 2\n'
    both = Pages({"router": ("router", parse_page(routed(10, 10))), "decode-0": ("decode", parse_page(worker))}, [])
    assert texts(cache_findings(both), "warning") == [
        "2 store operations ended as misses: x",
        "7 blocks that prefill had computed did not reach decode: expired",
    ]


def test_pages_of_nobody_are_empty() -> None:
    assert isinstance(pages()["nobody"], Page)
    assert pages().of("decode").total("x") == 0
