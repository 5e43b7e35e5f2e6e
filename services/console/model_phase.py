"""The model phase: fetch and convert the weights once, before any worker starts, so that workers only map them."""

from __future__ import annotations

import asyncio
import os

from services.console.board import Board
from services.console.options import UpOptions
from services.console.terminal import home_text
from services.console.threads import in_daemon_thread
from shared.config import read_config
from shared.engine.config import EngineConfig
from shared.engine.model.loader import resolve_model


async def fetch_model(options: UpOptions, board: Board) -> None:
    """Convert (or find converted) the model of `options`. ModelFault, ConfigError or EnvironmentFault as the loader raises them."""
    loop = asyncio.get_running_loop()
    cache_dir = read_config(EngineConfig, os.environ).cache_dir
    board.begin("model", "looking for it")

    def report(text: str, fraction: float | None = None) -> None:
        loop.call_soon_threadsafe(board.progress, "model", text, fraction)

    folder = await in_daemon_thread(lambda: resolve_model(options.model, cache_dir, report))
    board.done("model", f"{folder.name} · {home_text(folder.path)}")
