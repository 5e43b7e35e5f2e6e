"""`slipstream models`: what has been converted, and converting one ahead of its first use."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.console.board import Board
from services.console.terminal import Terminal, home_text, narrowed, size_text
from services.console.usage import Parser
from shared.config import read_config
from shared.engine.config import EngineConfig
from shared.engine.model.loader import KNOWN_MODELS, list_models, verify_model


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = Parser(prog="slipstream models", description="List the converted models, or convert and verify one ahead.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    listing = verbs.add_parser("list", help="what is converted, and what is known by name (the default)")
    for each in (parser, listing):
        each.add_argument("--json", action="store_true", help="for scripts", default=argparse.SUPPRESS)
    add = verbs.add_parser("add", help="convert and verify")
    add.add_argument("model", metavar="PATH", help="a .gguf file, a folder with config.json and safetensors, or a known name")
    options = parser.parse_args(argv)
    terminal = Terminal()
    cache_dir = read_config(EngineConfig, os.environ).cache_dir
    return _add(options.model, cache_dir, terminal) if options.verb == "add" else _list(cache_dir, terminal, as_json="json" in options)


def _add(model: str, cache_dir: Path, terminal: Terminal) -> int:
    board = Board(terminal, time.monotonic)
    board.begin("model", "reading")
    try:
        folder = verify_model(model, cache_dir, lambda text, fraction: board.progress("model", text, fraction))
        board.done("model", f"{folder.name} · {folder.architecture.family} · verified")
    finally:
        board.close()
    terminal.say(f"    {home_text(folder.path)}")
    terminal.say(f"    Use it: slipstream up --model {model}")
    return 0


def _list(cache_dir: Path, terminal: Terminal, *, as_json: bool) -> int:
    manifests = list_models(cache_dir)
    if as_json:
        terminal.say(msgspec.json.encode({"converted": manifests, "known": sorted(KNOWN_MODELS)}).decode())
        return 0
    rows: list[Sequence[str]] = [("name", "size", "from", "folder")]
    for manifest in manifests:
        folder = home_text(cache_dir / "models" / manifest.source_digest[:12]) + "…"
        rows.append((manifest.name, size_text(sum(manifest.file_bytes.values())), manifest.source, folder))
    converted = {manifest.name for manifest in manifests}
    rows += [(name, "–", bundle.distribution, "converted at first use") for name, bundle in KNOWN_MODELS.items() if name not in converted]
    for line in narrowed(rows, terminal.columns, ("from",), {"size": 0}):
        terminal.say(line)
    return 0
