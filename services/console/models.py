"""`slipstream models`: what has been converted, and converting one ahead of its first use."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from services.console.terminal import Terminal
from shared.config import read_config
from shared.engine.config import EngineConfig


def run(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="slipstream models", description="List the converted models, or convert and verify one ahead.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    verbs.add_parser("list", help="what is converted (the default)")
    add = verbs.add_parser("add", help="convert and verify")
    add.add_argument("model", metavar="PATH", help="a .gguf file, a folder with config.json and safetensors, or a known name")
    options = parser.parse_args(argv)
    terminal = Terminal()
    cache_dir = read_config(EngineConfig, os.environ).cache_dir
    return _add(options.model, cache_dir, terminal) if options.verb == "add" else _list(cache_dir, terminal)
