"""The model phase: fetch and convert the weights once, before any worker starts, so that workers only map them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from services.console.arena_size import check_arena_holds
from services.console.board import Board
from services.console.options import UpOptions
from services.console.terminal import size_text
from services.console.threads import in_daemon_thread
from shared.config import read_config
from shared.engine.config import EngineConfig
from shared.engine.model.loader import CHOICES, KNOWN_MODELS, list_models, resolve_model
from shared.errors import ConfigError


async def fetch_model(options: UpOptions, board: Board) -> None:
    """Convert (or find converted) the model of `options`. ModelFault: it cannot be served.

    ConfigError: there is no such model, its context is shorter than what is asked for, or the DRAM tier cannot hold a block of it.
    """
    loop = asyncio.get_running_loop()
    engine = read_config(EngineConfig, os.environ)
    cache_dir = engine.cache_dir
    board.begin("model", "looking for it")
    _check_name(options.model, cache_dir)

    def report(text: str, fraction: float | None) -> None:
        loop.call_soon_threadsafe(board.progress, "model", text, fraction)

    folder = await in_daemon_thread(lambda: resolve_model(options.model, cache_dir, report))
    check_context(options, folder.max_model_len)
    if "kvstore" in options.roles and options.device != "sim":
        check_arena_holds(options, folder.architecture, engine.block_size)
    weight_bytes = sum((folder.path / name).stat().st_size for name in folder.weight_files)
    board.done("model", f"{folder.name} · {folder.architecture.family} · {size_text(weight_bytes)} of weights")


def check_context(options: UpOptions, limit: int) -> None:
    """ConfigError if more tokens are asked for than the model's `limit`. The simulated engine has none."""
    if options.max_model_len > limit and options.device != "sim":
        remedy = f"Give at most {limit}, or leave it away"
        raise ConfigError("--max-model-len", options.max_model_len, f"the model's context is {limit} tokens", remedy=remedy)


def _check_name(model: str, cache_dir: Path) -> None:
    """A name that leads nowhere is a mistake in the flag (exit 2); whatever is wrong with what it leads to is not (exit 3)."""
    known = {*KNOWN_MODELS, *(manifest.name for manifest in list_models(cache_dir))}
    if model not in known and not Path(model).expanduser().exists():
        raise ConfigError("--model", model, "no such file, folder or model", remedy=f"{CHOICES}\nSee: slipstream models")
