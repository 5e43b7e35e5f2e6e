"""A writer that stops itself (SIGSTOP) in the middle of filling its slots, and goes on when it is woken: run by a fault test.

Arguments: NATS URL, namespace, arena folder. Prints the result of its store.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from shared.bus.nats import connect
from shared.config import ServiceConfig
from shared.kvclient import KvClient
from shared.messages.subjects import Subjects
from shared.telemetry import NullTelemetry
from tests.support.kvstore import LAYOUT, MODEL, Chain, Pool


class StoppingPool(Pool):
    """Stops the process after the checks and before the bytes."""

    def export_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        self.data[:] = 255
        super().export_blocks(block_ids, out)


async def main(url: str, namespace: str, directory: Path) -> None:
    bus = await connect(ServiceConfig(nats_url=url, namespace=namespace), name="writer")
    client = KvClient(bus, Subjects(namespace), NullTelemetry(), "abababab", directory, LAYOUT, MODEL, StoppingPool(16, is_on_host=False))
    await client.open()
    result = await client.store(Chain(8, first_token=7000).to_store())
    print(result.num_stored, result.reason)
    await client.close()
    await bus.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
