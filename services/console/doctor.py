"""`slipstream doctor`: what is wrong here, and what to do about it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.console.bus_findings import bus_findings, card_findings
from services.console.bus_look import BusLook, look_at_bus
from services.console.cache_findings import cache_findings
from services.console.findings import Finding, show, stack_findings, where
from services.console.fleet_view import read_leases, read_model_names, visit
from services.console.last_start import failed_start_findings
from services.console.machine_findings import container_findings, environment_findings
from services.console.pages import Pages, read_pages
from services.console.process_findings import process_findings, silent_findings
from services.console.remedy import logs_command
from services.console.run_folder import Run, add_run_flags, find_run, is_elsewhere, live_runs, state_dir
from services.console.store_check import noted_findings
from services.console.terminal import Terminal
from services.console.usage import Parser
from shared.errors import EnvironmentFault, SlipstreamError
from shared.messages.fleet import WorkerLease
from shared.messages.subjects import Subjects

PARTS = ("environment", "stack", "cache")


def run(argv: Sequence[str]) -> int:
    """The command. Exit 1 if something is broken; what only could be better does not count."""
    parser = Parser(
        prog="slipstream doctor", description="What is wrong, and what to do: this machine, the running stack, why prompts are not cached."
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="only this (default: all)")
    parser.add_argument("--json", action="store_true", help="for scripts")
    add_run_flags(parser)
    options = parser.parse_args(argv)
    findings = examine(state_dir(options.state_dir), (options.part,) if options.part else PARTS, options.run)
    if options.json:
        sys.stdout.write(msgspec.json.encode(findings).decode() + "\n")
    else:
        terminal = Terminal()
        for part, found in findings.items():
            terminal.say(terminal.paint(part, "bold"))
            for finding in found:
                show(finding, terminal)
    return 1 if any(finding.state == "failed" for found in findings.values() for finding in found) else 0


def examine(root: Path, parts: Sequence[str], wanted: str = "") -> dict[str, list[Finding]]:
    """Part → findings, in order. That no stack runs is a finding; which of several is meant must be said (EnvironmentFault)."""
    findings: dict[str, list[Finding]] = {}
    if "environment" in parts:
        findings["environment"] = container_findings() if is_elsewhere() else environment_findings(root)
    asked = [part for part in ("stack", "cache") if part in parts]
    if not asked:
        return findings
    try:
        stack = find_run(root, wanted)
    except EnvironmentFault as fault:
        if wanted or live_runs(root):
            raise
        failed = failed_start_findings(root, time.time())
        return findings | {part: [Finding("warning", fault.message, fault.remedy), *failed] for part in asked}
    try:
        looked = asyncio.run(_look(stack))
    except SlipstreamError as error:
        remedies = ("docker compose ps -a", f"{logs_command()} setup nats") if logs_command() else (error.remedy, "slipstream logs nats")
        silent = Finding("failed", f"the stack cannot be asked: {error.message.rstrip(': ')}", "\n".join(filter(None, remedies)))
        return findings | {part: [silent, *(_without_nats(stack) if part == "stack" else [])] for part in asked}
    leases, pages, told, models = looked
    if "stack" in asked:
        findings["stack"] = [
            *stack_findings(stack, leases, pages),
            *_without_nats(stack),
            *silent_findings(stack, leases),
            *bus_findings(told, leases, Subjects(stack.namespace)),
            *card_findings(models, leases, Subjects(stack.namespace)),
        ]
    if "cache" in asked:
        looked_at = [] if "stack" in asked else [Finding("done", where(stack))]
        findings["cache"] = [*looked_at, *cache_findings(pages)]
    return findings


def _without_nats(stack: Run) -> list[Finding]:
    """What is known of the stack without asking it."""
    noted = noted_findings(stack.nats_password_file.parent) if stack.is_elsewhere and stack.nats_password_file else []
    return [*noted, *process_findings(stack)]


async def _look(stack: Run) -> tuple[list[WorkerLease], Pages, BusLook, dict[str, str]]:
    """Who is there, what they count, what NATS tells, and the models with a card."""
    async with visit(stack) as (bus, subjects):
        leases = await read_leases(bus, subjects)
        pages, told, models = await asyncio.gather(read_pages(leases), look_at_bus(bus, subjects, leases), read_model_names(bus, subjects))
    return leases, pages, told, models
